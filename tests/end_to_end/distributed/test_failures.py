"""What fails in one process ends all of them, each with a word of its own, and nothing is lost."""

from __future__ import annotations

import re

import pytest

from glm_grpo.data.prompts import batch_for_step, load_prompts
from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.folder import RunFolder
from tests.end_to_end.distributed.conftest import metrics_of

pytestmark = [pytest.mark.timeout(900)]

PICKY = "+reward.terms.picky={kind: custom, function: 'picky:score', weight: 0.1}"

PICKY_MODULE = """
def score(prompts, pixels):
    if prompts[0].prompt == {refused!r}:
        raise ConnectionError("the scorer is gone")
    return pixels.float().mean(dim=(1, 2, 3)) / 255
"""


def error_in(output: str) -> str:
    """The one error that a process says, with its notes."""
    assert "Traceback" not in output, output
    (error,) = re.findall(r"^\w+Error: .*", output, re.MULTILINE | re.DOTALL)
    return error


def test_a_term_that_fails_in_one_process_ends_all_and_the_finished_step_is_saved(launcher):
    prompts = load_prompts(str(launcher.folder / "train.txt"), height=64, width=64)
    batch = batch_for_step(prompts, step=2, seed=0, prompts_per_step=3, group_size=2)
    # Two processes take two prompts and one: the last prompt is that of process 1.
    refused = batch.prompts[-1]
    (launcher.folder / "picky.py").write_text(PICKY_MODULE.format(refused=refused.prompt))

    run = launcher.folder / "picky"
    first, second = launcher.start("picky", "train.checkpoint_every=100", PICKY, processes=2)

    assert [each.wait() for each in (first, second)] == [1, 1]
    peer, own = (error_in(each.said()) for each in (first, second))
    assert peer.startswith("PeerError: process 1 of 2 failed: RewardError: term picky")
    assert own.startswith(f"RewardError: term picky, prompt {refused.prompt_id}, image 0: scoring")
    for said in (peer, own):
        assert re.search(f"Step 1 is saved; continue with .*train.resume={run}", said)
    folder = RunFolder(run)
    assert len(list(folder.failure_dir(2).glob("*.png"))) == 2
    assert load_checkpoint(newest_checkpoint(folder)).step == 1
    assert [row["step"] for row in metrics_of(run)] == [0, 1]


@pytest.mark.long
def test_a_launch_by_torchrun_trains(launcher):
    ended = launcher.launch("torchrun", processes=2)
    assert ended.code == 0, ended.output
    assert [row["step"] for row in metrics_of(launcher.folder / "torchrun")] == [0, 1, 2]
