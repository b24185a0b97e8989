"""A process that is killed ends the others, and the run goes on with another number of them."""

from __future__ import annotations

import shutil
import signal

import pytest

from tests.end_to_end.distributed.conftest import Launcher, assert_same_metrics, metrics_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

RUN = ("train.steps=3", "train.checkpoint_every=1", "train.keep_checkpoints=9")
MINUTE = 60.0


@pytest.fixture(scope="module")
def whole(launcher):
    """A run of one process that nobody stopped."""
    return launcher.run("whole", *RUN)


def killed(launcher: Launcher, run: str, *, rank: int, processes: int = 2):
    """Kills a process once the first step is saved; how the launch ended."""
    launch = launcher.start(run, *RUN, processes=processes)
    launch.wait_for(launcher.folder / run / "checkpoints" / "step-000001")
    launch.worker(rank).send_signal(signal.SIGKILL)
    return launch.wait(MINUTE)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_one_of_three_ends_the_others_and_two_go_on(launcher, whole, rank):
    name = f"killed-{rank}-of-3"
    ended = killed(launcher, name, rank=rank, processes=3)

    summary = ended.output[ended.output.index("Root Cause") :]
    assert f"rank      : {rank} (local_rank: {rank})" in summary
    resumed = launcher.run(name, *RUN, "train.resume=auto", processes=2)
    assert_same_metrics(resumed, whole)


def test_three_processes_go_on_with_what_one_began(launcher, whole):
    shutil.copytree(whole, launcher.folder / "one-then-three")
    first = launcher.folder / "one-then-three" / "checkpoints" / "step-000001"
    resumed = launcher.run("one-then-three", *RUN, f"train.resume={first}", processes=3)
    assert_same_metrics(resumed, whole)
    assert [row["step"] for row in metrics_of(resumed)] == [0, 1, 2, 3]
