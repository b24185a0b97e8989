"""Processes that are killed, and runs that go on with another number of them."""

from __future__ import annotations

import shutil

import pytest

from tests.end_to_end.distributed.conftest import assert_same_metrics, metrics_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

RUN = ("train.steps=3", "train.checkpoint_every=1", "train.keep_checkpoints=9")
MINUTE = 60.0


@pytest.fixture(scope="module")
def whole(launcher):
    """A run of one process that nobody stopped."""
    return launcher.run("whole", *RUN)


def test_a_killed_process_ends_the_others_and_one_goes_on(launcher, whole):
    checkpoint = launcher.folder / "killed" / "checkpoints" / "step-000001"
    first, second = launcher.start("killed", *RUN, processes=2)
    while not checkpoint.exists():
        assert first.wait(0.05) is None, first.said()
    second.kill()

    assert first.wait(MINUTE) not in (0, None)
    assert "PeerError: process 0 of 2 lost the connection to another one (" in first.said()
    assert_same_metrics(launcher.run("killed", *RUN, "train.resume=auto"), whole)


def test_three_processes_go_on_with_what_one_began(launcher, whole):
    shutil.copytree(whole, launcher.folder / "one-then-three")
    first = launcher.folder / "one-then-three" / "checkpoints" / "step-000001"
    resumed = launcher.run("one-then-three", *RUN, f"train.resume={first}", processes=3)
    assert_same_metrics(resumed, whole)
    assert [row["step"] for row in metrics_of(resumed)] == [0, 1, 2, 3]
