"""Runs of train.py on several processes, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from tests.programs import Program, Programs

ROOT = Path(__file__).resolve().parents[3]

TRAINING = ("GO", "ON", "UP", "IN", "AT", "BY", "SO", "WE")
HELD_OUT = ("NO", "GO", "ON")

LIMIT_SECONDS = 400.0
"""Of one launch, many times what it takes on two idle cores."""

SMALL = (
    "rollout.prompts_per_step=3",
    "rollout.group_size=2",
    "rollout.height=128",
    "rollout.width=128",
    "train.steps=2",
    "train.checkpoint_every=1",
    "train.eval_every=100",
    "train.micro_batch_size=2",
    "eval.samples_per_prompt=1",
    "optim.warmup_steps=0",
    "optim.schedule=constant",
    "optim.learning_rate=1e-4",
    "optim.epsilon=1e-3",
    "decode.steps=2",
    "trackers=[]",
)
"""Three prompts a step: two processes have unequal parts.

Smaller images of the shipped model are plain ones: groups would be flat.
Adam's first updates are signs of gradients, of those near 0 too, where rounding decides, and a
token in hundreds then differs between runs. A large epsilon makes them smooth.
"""

SHARDS = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
"""What `accelerate launch` sets for FSDP2."""


class Launcher:
    """Runs train.py in a folder of its own.

    Args:
        folder: Working directory, with the prompt files, own modules and logs.
        programs: Starts processes.
    """

    def __init__(self, folder: Path, programs: Programs) -> None:
        self.folder = folder
        self._programs = programs
        self._started: list[Program] = []
        self.write_prompts("train.txt", "red", TRAINING)
        self.write_prompts("held_out.txt", "blue", HELD_OUT)

    def arguments(self, run: str, overrides: Sequence[str]) -> list[str]:
        return [
            str(ROOT / "train.py"),
            f"run_dir={self.folder / run}",
            f"data.path={self.folder / 'train.txt'}",
            f"data.eval_path={self.folder / 'held_out.txt'}",
            *("lpips=null", "ssim=0"),
            *SMALL,
            *overrides,
        ]

    def start(
        self, run: str, *overrides: str, processes: int = 1, env: dict[str, str] | None = None
    ) -> list[Program]:
        """Starts the processes of a run in the folder `run`, as torchrun does."""
        started = self._programs.start_team(
            processes,
            self.folder,
            *self.arguments(run, overrides),
            env=env,
            prepare="tests.small_preview:shrink_preview",
        )
        self._started += started
        return started

    def run(
        self, run: str, *overrides: str, processes: int = 1, env: dict[str, str] | None = None
    ) -> Path:
        """A run from start to end, which must be a good one; its folder."""
        started = self.start(run, *overrides, processes=processes, env=env)
        assert [each.wait(LIMIT_SECONDS) for each in started] == [0] * processes, "\n".join(
            each.said() for each in started
        )
        return self.folder / run

    def write_prompts(self, name: str, colour: str, words: Sequence[str]) -> None:
        lines = [f'A {colour} sign that says "{word}"' for word in words]
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def end(self) -> None:
        """Kills what still runs."""
        for program in self._started:
            program.kill()


@pytest.fixture(scope="module")
def launcher(programs, tmp_path_factory):
    """Starts runs; whatever still lives when a file's tests are done is killed."""
    launcher = Launcher(tmp_path_factory.mktemp("runs"), programs)
    yield launcher
    launcher.end()


def metrics_of(run: Path) -> list[dict[str, float | None]]:
    """All metrics that do not depend on the clock or on memory."""
    rows = read_metrics(RunFolder(run))
    timed = ("time/", "throughput/", "memory/")
    return [{name: row[name] for name in sorted(row) if not name.startswith(timed)} for row in rows]


def rounding(name: str) -> float:
    """How far apart a metric may be.

    The norm of the gradient is about 1, and after two updates of other sums up to 3e-5 apart; in a
    correlation of a few scores their rounding counts several times.
    """
    return 1e-4 if name == "optim/grad_norm" or name.startswith("correlation/") else 1e-5


def assert_same_metrics(run: Path, expected: Path) -> None:
    """Row by row and name by name, see `rounding`."""
    ours, theirs = metrics_of(run), metrics_of(expected)
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        far = {
            name: (own[name], other[name])
            for name in own
            if own[name] != pytest.approx(other[name], abs=rounding(name))
        }
        assert not far, f"step {own['step']}: {far}"


def files_of(run: Path) -> list[str]:
    """Everything in a run folder, as relative paths."""
    return sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())
