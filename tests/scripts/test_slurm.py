"""The Slurm scripts, under a real Slurm."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glm_grpo.run.checkpoints import newest_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from tests.end_to_end.processes.conftest import write_prompts
from tests.end_to_end.runs import read_record
from tests.programs import Programs
from tests.scripts.slurm import PATIENCE_SECONDS, Slurm, started, why_not

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

ROOT = Path(__file__).resolve().parents[2]

LAST_STEP = 8
SMALL = (
    *(f"train.steps={LAST_STEP}", "train.eval_every=100", "train.checkpoint_every=100"),
    *("train.keep_checkpoints=1", "train.micro_batch_size=4", "decode.steps=1"),
    *("rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples_per_prompt=1"),
    *("rollout.height=64", "rollout.width=64", "trackers=[]", "optim.schedule=constant"),
    *("~reward.terms.lpips", "~reward.terms.ocr", "~reward.terms.aesthetic"),
)
"""Nothing is saved but at a signal and at the end."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with started(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    write_prompts(tmp_path)
    places = (tmp_path / "train.jsonl", tmp_path / "held_out.jsonl")
    return [*SMALL, f"data.path={places[0]}", f"data.eval_path={places[1]}"]


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path, overrides: list[str]) -> Callable[..., str]:
    """Puts a script into the queue; the number of its job."""

    def submit(script: str, *more: str, cards: int = 1) -> str:
        job = (f"--gpus-per-node={cards}", "--cpus-per-task=2", "--mem=1", "--time=30")
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_FILE": "ddp",
            "RUN_DIR": str(tmp_path / "run"),
        }
        place = (f"--chdir={ROOT}", f"--output={tmp_path / 'log'}")
        path = str(ROOT / "scripts" / "slurm" / f"{script}.sbatch")
        return slurm.ask("sbatch", "--parsable", *job, *place, path, *overrides, *more, env=env)

    return submit


def stop_and_go_on(slurm: Slurm, job: str, folder: RunFolder) -> None:
    """Signals the job in its first steps, as Slurm does when the time is up, and lets it go on."""
    log = folder.path.parent / "log"
    end = time.monotonic() + PATIENCE_SECONDS
    while not folder.metrics_path.exists() or len(read_metrics(folder)) < 2:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    slurm.ask("scancel", "--signal=TERM", "--batch", job)
    said = slurm.wait_for(job, "PENDING")
    assert "Restarts=1" in said
    steps = [row["step"] for row in read_metrics(folder)]
    assert steps == [*range(len(steps))]
    assert steps[-1] < LAST_STEP
    assert newest_checkpoint(folder) == folder.checkpoint_dir(steps[-1]), log.read_text()
    # Slurm puts it off for two minutes, so that no node takes it for the one that was ended.
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    slurm.wait_for(job, "COMPLETED")
    begun = re.findall(r"continuing \S+ from step-(\d+)", log.read_text())
    assert [int(step) for step in begun] == [steps[-1]]


@pytest.mark.parametrize(("script", "processes"), [("one_node", 1), ("multi_node", 2)])
def test_a_stopped_job_is_put_back_and_ends_as_one_never_stopped(
    script: str,
    processes: int,
    submit: Callable[..., str],
    slurm: Slurm,
    programs: Programs,
    overrides: list[str],
    tmp_path: Path,
) -> None:
    stop_and_go_on(slurm, submit(script), RunFolder(tmp_path / "run"))

    whole = (str(ROOT / "train.py"), *overrides, f"run_dir={tmp_path / 'whole'}")
    team = programs.start_team(processes, tmp_path, *whole)
    assert [each.wait(PATIENCE_SECONDS) for each in team] == [0] * processes, team[0].said()
    assert read_record(tmp_path / "run") == read_record(tmp_path / "whole")


def test_a_stopped_job_with_collectors_is_put_back_and_goes_on(
    submit: Callable[..., str], slurm: Slurm, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    folder = RunFolder(tmp_path / "run")
    stop_and_go_on(slurm, submit("async", cards=0), folder)
    assert [row["step"] for row in read_metrics(folder)] == [*range(LAST_STEP + 1)]


def test_a_job_that_fails_is_not_put_back(
    submit: Callable[..., str], slurm: Slurm, tmp_path: Path
) -> None:
    job = submit("one_node", "train.steps=0")
    assert "Restarts=0" in slurm.wait_for(job, "FAILED")
    assert "train.steps = 0" in (tmp_path / "log").read_text()
