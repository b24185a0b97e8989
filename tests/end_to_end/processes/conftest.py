"""Real processes that train, started in a fraction of a second each, and what they leave."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from glm_grpo.config import shell_override
from tests.end_to_end.runs import read_record
from tests.programs import PATIENCE, Program, Programs

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class StartedRun:
    """A process that trains.

    Attributes:
        program: The process.
        changes: A line for each change of the run folder.
    """

    program: Program
    changes: Path

    @property
    def pid(self) -> int:
        return self.program.pid

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """Exit code, negative for a signal; None where it still runs after so many seconds."""
        return self.program.wait(seconds)

    def said(self) -> str:
        return self.program.said()

    def listed_changes(self) -> list[str]:
        """With the process id left out of names."""
        return self.changes.read_text().replace(f".{self.pid}.tmp", ".tmp").splitlines()

    def number_of(self, text: str) -> int:
        """Number of the first change whose line holds the text."""
        return find_change(self.listed_changes(), text)


@dataclass
class TrainServer:
    """Starts runs, small enough for many.

    Attributes:
        folder: Has the prompts.
    """

    folder: Path
    programs: Programs

    def start(
        self, run_dir: Path, *overrides: str, signals: Mapping[int, int] | None = None
    ) -> StartedRun:
        """Starts a run, or goes on with the one in `run_dir`.

        Args:
            run_dir: Folder of the run.
            overrides: Overrides of the config.
            signals: It sends itself, by number of the change of `run_dir` before which it does.
        """
        changes = self.folder / f"changes-{len(self.programs.started)}.txt"
        place = shlex.split(shell_override("run_dir", str(run_dir)))
        program = self.programs.start(
            self.folder,
            str(ROOT / "train.py"),
            *small_run(self.folder),
            *place,
            *overrides,
            is_one_stream=True,
            prepare="tests.end_to_end.processes.changes:watch",
            run_dir=str(run_dir),
            signals=dict(signals or {}),
            log=str(changes),
        )
        return StartedRun(program, changes)

    def finish(self, run_dir: Path, *overrides: str) -> StartedRun:
        """Runs to the end, or goes on to it, without a failure."""
        run = self.start(run_dir, *overrides)
        assert run.wait() == 0, run.said()
        return run


@dataclass(frozen=True)
class WholeRun:
    """A run that nothing disturbed.

    Attributes:
        record: What it left, see `read_record`.
        changes: Of its folder, a line each, in their order.
    """

    record: dict[str, Any]
    changes: list[str]

    def number_of(self, text: str) -> int:
        """Number of the first change whose line holds the text."""
        return find_change(self.changes, text)


def find_change(changes: Sequence[str], text: str) -> int:
    return next(number for number, change in enumerate(changes) if text in change)


def small_run(folder: Path) -> list[str]:
    """Two steps of two prompts, two images of 64 pixels each; a checkpoint after every step."""
    return [
        *("--config-name=tiny", "train.resume=auto", "train.steps=2", "train.eval_every=2"),
        *("train.checkpoint_every=1", "train.keep_checkpoints=1", "train.micro_batch_size=4"),
        *("rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples_per_prompt=2"),
        *("rollout.height=64", "rollout.width=64", "decode.steps=1", "trackers=[]"),
        *("reward.terms.lpips=null", "reward.terms.ocr=null", "reward.terms.aesthetic=null"),
        *(f"data.path={folder / 'train.jsonl'}", f"data.eval_path={folder / 'held_out.jsonl'}"),
    ]


def write_prompts(folder: Path) -> None:
    """Prompts with targets of noise, so that the one term, SSIM, applies."""
    noise = numpy.random.default_rng(0)
    rows = []
    for index in range(4):
        pixels = noise.integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        prompt = f"prompt {index}"
        rows.append(json.dumps({"prompt": prompt, "id": f"p{index}", "target": f"{index}.png"}))
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "held_out.jsonl").write_text(rows[0])


@pytest.fixture(scope="session")
def train_server(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> TrainServer:
    """Starts runs that are real processes, in a fraction of a second each."""
    folder = tmp_path_factory.mktemp("server")
    write_prompts(folder)
    return TrainServer(folder, programs)


@pytest.fixture(scope="session")
def whole_run(train_server: TrainServer, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """What a run of the server is compared with."""
    run_dir = tmp_path_factory.mktemp("whole") / "day" / "run"
    run = train_server.finish(run_dir)
    return WholeRun(read_record(run_dir), run.listed_changes())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """In a folder that a test may remove."""
    return tmp_path / "day" / "run"


@pytest.fixture(scope="session")
def record_of() -> Callable[[Path], dict[str, Any]]:
    """Reads all of a run that must be equal in two of the same settings and seed."""
    return read_record
