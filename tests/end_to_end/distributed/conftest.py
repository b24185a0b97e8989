"""Runs of train.py on several processes, started as a user starts them, on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

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
    "trackers=[]",
)
"""Three prompts a step: two processes have unequal parts.

Smaller pictures of the shipped model are plain ones: groups would be flat.
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


@dataclass(frozen=True)
class Ended:
    """A launch that ended.

    Attributes:
        code: Of the launcher, or of the one process.
        output: What all processes and the launcher wrote.
        seconds: It took.
    """

    code: int
    output: str
    seconds: float


@dataclass
class Launch:
    """train.py on its way.

    Attributes:
        process: The launcher, or the one process.
        log: Where all of them write.
    """

    process: subprocess.Popen
    log: Path
    started: float = field(default_factory=time.monotonic)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = LIMIT_SECONDS) -> Ended:
        """Waits for the end of the launcher; one that hangs fails the test with its output."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail(f"no end within {seconds:.0f} s:\n{self.output()}")
        return Ended(code, self.output(), time.monotonic() - self.started)

    def wait_for(self, path: Path, seconds: float = LIMIT_SECONDS) -> None:
        """Waits until there is something at `path`."""
        end = time.monotonic() + seconds
        while not path.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.end()
                pytest.fail(f"there is no {path}:\n{self.output()}")
            time.sleep(0.05)

    def worker(self, rank: int) -> psutil.Process:
        """One of the launcher's processes."""
        workers = psutil.Process(self.process.pid).children()
        return next(each for each in workers if each.environ().get("RANK") == str(rank))

    def end(self) -> None:
        """Kills whatever is left of it."""
        try:
            left = [psutil.Process(self.process.pid)]
        except psutil.NoSuchProcess:
            return
        left += left[0].children(recursive=True)
        for each in left:
            try:
                each.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)


class Launcher:
    """Starts train.py in a folder of its own.

    Args:
        folder: Working directory, with the prompt files, own modules and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._launches: list[Launch] = []
        self.write_prompts("train.txt", "red", TRAINING)
        self.write_prompts("held_out.txt", "blue", HELD_OUT)

    def start(
        self, run: str, *overrides: str, processes: int = 1, env: dict[str, str] | None = None
    ) -> Launch:
        """Starts a run in the folder `run`, on so many processes."""
        command = [sys.executable]
        if processes > 1:
            # --standalone finds a port of its own: tests run side by side.
            nproc = f"--nproc_per_node={processes}"
            command += ["-m", "torch.distributed.run", "--standalone", nproc]
        command += [
            str(ROOT / "train.py"),
            f"run_dir={self.folder / run}",
            f"data.path={self.folder / 'train.txt'}",
            f"data.eval_path={self.folder / 'held_out.txt'}",
            "~reward.terms.lpips",
            *SMALL,
            *overrides,
        ]
        log = self.folder / f"{run}-{len(self._launches)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=_environment(env or {}), stdout=file, stderr=file
            )
        launch = Launch(process, log)
        self._launches.append(launch)
        return launch

    def run(
        self, run: str, *overrides: str, processes: int = 1, env: dict[str, str] | None = None
    ) -> Path:
        """A run from start to end, which must be a good one; its folder."""
        ended = self.start(run, *overrides, processes=processes, env=env).wait()
        assert ended.code == 0, ended.output
        return self.folder / run

    def write_prompts(self, name: str, colour: str, words: Sequence[str]) -> None:
        lines = [f'A {colour} sign that says "{word}"' for word in words]
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def end(self) -> None:
        for launch in self._launches:
            launch.end()


def _environment(more: dict[str, str]) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if re.match("ACCELERATE_|FSDP_|PYTEST_", name) is None
    }
    return {
        **inherited,
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **more,
    }


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """Starts runs; whatever still lives when a file's tests are done is killed."""
    launcher = Launcher(tmp_path_factory.mktemp("runs"))
    yield launcher
    launcher.end()


def metrics_of(run: Path) -> list[dict[str, float | None]]:
    """All metrics that do not depend on the clock or on memory."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
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
