"""A run on several processes that is asked to stop ends after its step, saved."""

from __future__ import annotations

import signal

import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.training.checkpoint.files import load_checkpoint, newest_checkpoint
from tests.end_to_end.distributed.conftest import metrics_of

pytestmark = [pytest.mark.timeout(900)]

# The launcher kills what has not ended by then; a step takes longer than its half a minute where
# many tests run side by side.
PATIENCE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "180"}
RUN = ("train.steps=100", "train.checkpoint_every=1000")


def stopped(launcher, run, number):
    launch = launcher.start(run, *RUN, processes=2, env=PATIENCE)
    launch.wait_for(RunFolder(launcher.folder / run).rollout_path(1))
    launch.process.send_signal(number)
    return launch.wait()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)],
)
def test_a_signal_to_the_launcher_stops_all_processes_after_their_step(launcher, number):
    run = launcher.folder / number.name
    ended = stopped(launcher, number.name, number)

    assert "stopped and saved; go on with train.resume=" in ended.output, ended.output
    assert "PeerError" not in ended.output
    last = metrics_of(run)[-1]["step"]
    assert 1 <= last < 100
    assert load_checkpoint(newest_checkpoint(RunFolder(run))).step == last
