"""Runs of train.py with real collectors, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics

ROOT = Path(__file__).parents[3]
SOON = 480.0
"""Seconds after which a test gives up on a run."""

PROMPTS = 'a red sign "CAT"\na blue sign "DOG"\n'
TERM = """
import os, time
def brightness(prompts, pixels):
    if os.environ.get("FAILS_IN") == str(os.getppid() != int(os.environ["LEARNER_PARENT"])):
        raise ConnectionError("the scorer is gone")
    return pixels.float().mean(dim=(1, 2, 3)) / 255
"""


class Run:
    """A run of train.py on the embedded model, with one cheap term of the user's own."""

    def __init__(self, folder: Path, overrides: Sequence[str], environment: Mapping[str, str]):
        self.path = folder / "run"
        self._log = folder / "log.txt"
        arguments = [
            "train.steps=4",
            "rollout.prompts_per_step=2",
            "rollout.group_size=2",
            "train.micro_batch_size=4",
            "train.checkpoint_every=1",
            "train.eval_every=1000",
            "eval.samples_per_prompt=1",
            f"data.eval_path={folder / 'prompts.txt'}",
            *(f"reward.terms.{name}=null" for name in ("lpips", "ssim", "ocr", "aesthetic")),
            "+reward.terms.own.kind=custom",
            "+reward.terms.own.function=own_term:brightness",
            "+reward.terms.own.weight=1",
            "reward.allow_untied=true",
            "optim.warmup_steps=0",
            "optim.schedule=constant",
            "trackers=[]",
            f"run_dir={self.path}",
            *overrides,
        ]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *arguments],
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    # With as many threads as a collector has, the learner rounds as it does.
                    "OMP_NUM_THREADS": "1",
                    "LEARNER_PARENT": str(os.getpid()),
                    # Ray would end collectors where other tests take the machine's memory.
                    "RAY_memory_monitor_refresh_ms": "0",
                    **environment,
                },
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        return self.process.wait(timeout=SOON)

    def wait_for_step(self, step: int) -> None:
        """Until a step is recorded."""
        self.wait_until(lambda: len(self.rows()) > step)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON
        while not is_so():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end, self.log
            time.sleep(0.05)

    def rows(self) -> list[dict[str, float]]:
        folder = RunFolder(self.path)
        return read_metrics(folder) if folder.metrics_path.exists() else []

    def figures(self) -> list[dict[str, float]]:
        """All metrics that depend neither on the clock, nor on memory, nor on who collects."""
        besides = ("time/", "throughput/", "memory/", "async/")
        return [
            {name: value for name, value in row.items() if not name.startswith(besides)}
            for row in self.rows()
        ]

    def helpers(self) -> list[psutil.Process]:
        """Processes that the run started, and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def collectors(self) -> list[psutil.Process]:
        found = []
        for process in self.helpers():
            # A helper of Ray's may have ended meanwhile, or be a zombie.
            with contextlib.suppress(psutil.NoSuchProcess):
                if "".join(process.cmdline()).startswith("ray::Collector"):
                    found.append(process)
        return found


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Run]]:
    """Starts runs, each in a folder of its own unless one is given; ends those that still are."""
    runs: list[Run] = []

    def begin(
        *overrides: str, folder: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> Run:
        folder = folder or tmp_path_factory.mktemp("async")
        (folder / "prompts.txt").write_text(PROMPTS)
        (folder / "own_term.py").write_text(TERM)
        runs.append(Run(folder, overrides, environment or {}))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
