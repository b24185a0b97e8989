"""Real processes that train, started in a second each, and what they leave."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_table
from glm_grpo.training.checkpoint.files import load_checkpoint

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 200
"""Seconds after which a run that should have ended is taken to hang."""


@dataclass
class StartedRun:
    """A process that trains.

    Attributes:
        pid: Of the process.
        output: What it says, on stdout and stderr.
        changes: A line for each change of the run folder, where they are counted.
    """

    server: TrainServer
    pid: int
    output: Path
    changes: Path
    code: int | None = None

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """Exit code, negative for a signal; None where it still runs after so many seconds."""
        if self.code is None:
            self.code = self.server.ask({"wait": [self.pid, seconds]})
        return self.code

    def kill(self) -> None:
        """As `kill -9`."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            assert self.wait() is not None

    def proceed(self) -> int | None:
        """Lets a run that has stopped go on, to its end; its exit code."""
        os.kill(self.pid, signal.SIGCONT)
        return self.wait()

    def said(self) -> str:
        return self.output.read_text()

    def listed_changes(self) -> list[str]:
        """With the process id left out of names."""
        return self.changes.read_text().replace(f".{self.pid}.tmp", ".tmp").splitlines()

    def number_of(self, text: str) -> int:
        """Number of the first change whose line holds the text."""
        return find_change(self.listed_changes(), text)


@dataclass
class TrainServer:
    """Starts runs by `train_server.py`, small enough for many.

    Attributes:
        folder: Has the prompts.
    """

    folder: Path
    process: subprocess.Popen[str]
    runs: list[StartedRun] = field(default_factory=list)

    def ask(self, request: Mapping[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{json.dumps(request)}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self,
        run_dir: Path,
        *overrides: str,
        signals: Mapping[int, int] | None = None,
        is_quick: bool = True,
    ) -> StartedRun:
        """Starts a run, or goes on with the one in `run_dir`.

        Args:
            run_dir: Of the run.
            overrides: Of the config.
            signals: It sends itself, by number of the change of `run_dir` before which it does.
            is_quick: Whether changes are counted, rollouts taken from earlier runs, and nothing
                synced to the disk.
        """
        output = self.folder / f"output-{len(self.runs)}.txt"
        changes = self.folder / f"changes-{len(self.runs)}.txt"
        output.touch()
        pid = self.ask(
            {
                "start": {
                    # Options first: argparse wants all overrides in one piece.
                    "arguments": sorted(
                        [*small_run(self.folder), f"run_dir={run_dir}", *overrides],
                        key=lambda argument: not argument.startswith("-"),
                    ),
                    "folder": str(self.folder),
                    "output": str(output),
                    "run_dir": str(run_dir),
                    "store": str(self.folder / "rollouts") if is_quick else None,
                    "changes": str(changes) if is_quick else None,
                    "signals": dict(signals or {}),
                }
            }
        )
        self.runs.append(StartedRun(self, pid, output, changes))
        return self.runs[-1]

    def start_until(self, run_dir: Path, number: int, *overrides: str) -> StartedRun:
        """Starts a run that stops just before the change of that number, and waits for that."""
        run = self.start(run_dir, *overrides, signals={number: signal.SIGSTOP})
        while Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert run.wait(0.01) is None, run.said()
        return run

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

    def number_of(self, text: str, occurrence: int = 1) -> int:
        """Number of the change whose line holds the text, for the so manieth time."""
        return find_change(self.changes, text, occurrence)


def find_change(changes: Sequence[str], text: str, occurrence: int = 1) -> int:
    numbers = [number for number, change in enumerate(changes) if text in change]
    return numbers[occurrence - 1]


def small_run(folder: Path) -> list[str]:
    """Two steps of two prompts, two pictures of 64 pixels each; a checkpoint after every step."""
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
def train_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainServer]:
    """Starts runs that are real processes, in a second each."""
    folder = tmp_path_factory.mktemp("server")
    write_prompts(folder)
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("train_server.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    server = TrainServer(folder, process)
    yield server
    for run in server.runs:
        run.kill()
    process.communicate(timeout=PATIENCE)


@pytest.fixture(scope="session")
def whole_run(train_server: TrainServer, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """What a run of the server is compared with."""
    run_dir = tmp_path_factory.mktemp("whole") / "day" / "run"
    run = train_server.finish(run_dir)
    return WholeRun(read_record(run_dir), run.listed_changes())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two folders deep, like a dated one: `train.resume=auto` looks at its neighbours, too."""
    return tmp_path / "day" / "run"


@pytest.fixture(scope="session")
def record_of() -> Callable[[Path], dict[str, Any]]:
    """Reads all of a run that must be equal in two of the same settings and seed."""
    return read_record


def read_record(run_dir: Path) -> dict[str, Any]:
    """Without what hangs on the clock, on memory, or on the folder's name."""
    folder = RunFolder(run_dir)
    record: dict[str, Any] = {}
    for row in read_metrics(folder):
        measured = ("time/", "throughput/", "memory/")
        kept = {name: value for name, value in row.items() if not name.startswith(measured)}
        # A list, lest a line that is there twice goes unseen.
        record.setdefault(f"step {row['step']}", []).append(kept)
    for table in (*folder.rollouts_dir.iterdir(), *folder.evaluations_dir.iterdir()):
        record[f"{table.parent.name}/{table.name}"] = read_table(table).to_pylist()
    for picture in folder.images_dir.rglob("*.png"):
        record[str(picture.relative_to(run_dir))] = hashlib.sha256(picture.read_bytes()).hexdigest()
    for path in folder.checkpoints_dir.iterdir():
        checkpoint = load_checkpoint(path)
        record[path.name] = checkpoint.metadata
        for stem, named in checkpoint.tensors.items():
            for name, tensor in named.items():
                record[f"{path.name}/{stem}/{name}"] = tensor.flatten().tolist()
    record["canaries"] = folder.canaries_path.read_text()
    # All files and folders, what a kill left behind among them; TensorBoard's hold times.
    paths = (path.relative_to(run_dir) for path in run_dir.rglob("*"))
    record["names"] = sorted(str(path) for path in paths if path.parts[0] != "tensorboard")
    return record
