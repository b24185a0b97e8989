"""What fails in one process ends all of them, each with a word of its own, and nothing is lost."""

from __future__ import annotations

import re

import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.training.checkpoint.files import load_checkpoint, newest_checkpoint
from glm_grpo.training.data.prompts import batch_for_step, load_prompts
from tests.end_to_end.distributed.conftest import metrics_of

pytestmark = [pytest.mark.timeout(900)]

PICKY = "+reward.terms.picky={kind: custom, function: 'picky:score', weight: 0.1}"

PICKY_MODULE = """
def score(prompts, pixels):
    if prompts[0].prompt == {refused!r}:
        raise ConnectionError("the scorer is gone")
    return pixels.float().mean(dim=(1, 2, 3)) / 255
"""


def errors_in(output):
    """Classes of the expected errors: one for each process, which says one thing."""
    # The launcher's own is the only traceback.
    assert output.count("Traceback (most recent call last)") == 1, output
    return sorted(re.findall(r"^(\w+Error): ", output, re.MULTILINE))


def test_a_term_that_fails_in_one_process_ends_all_and_the_finished_step_is_saved(launcher):
    prompts = load_prompts(str(launcher.folder / "train.txt"), height=64, width=64)
    second = batch_for_step(prompts, step=1, seed=0, prompts_per_step=3, group_size=2)
    # Two processes take two prompts and one: the last prompt is that of process 1.
    refused = second.prompts[-1]
    (launcher.folder / "picky.py").write_text(PICKY_MODULE.format(refused=refused.prompt))

    run = launcher.folder / "picky"
    often = ("train.checkpoint_every=100", PICKY)
    ended = launcher.start("picky", *often, processes=2).wait()

    assert ended.code != 0
    assert errors_in(ended.output) == ["PeerError", "RewardError"], ended.output
    own = f"RewardError: term picky, prompt {refused.prompt_id}, image 0: scoring failed with "
    assert own in ended.output
    assert "PeerError: process 1 of 2 failed: RewardError: term picky" in ended.output
    assert ended.output.count(f"Step 1 is saved; go on with train.resume={run}") == 2
    folder = RunFolder(run)
    assert len(list(folder.failure_dir(2).glob("*.png"))) == 2
    assert load_checkpoint(newest_checkpoint(folder)).step == 1
    assert [row["step"] for row in metrics_of(run)] == [0, 1]

    (launcher.folder / "picky.py").write_text(PICKY_MODULE.format(refused=""))
    launcher.run("picky", *often, "train.resume=auto")
    assert [row["step"] for row in metrics_of(run)] == [0, 1, 2]


def test_records_that_cannot_be_written_end_all_processes(launcher):
    run = launcher.folder / "full"
    started = launcher.start("full", processes=2)
    # A run begins in an empty folder alone; its first rollout is many seconds away by then.
    started.wait_for(run / "config.yaml")
    (run / "rollouts").write_text("in the way of the folder of this name")

    ended = started.wait()

    assert ended.code != 0
    assert errors_in(ended.output) == ["PeerError", "StorageError"], ended.output
    assert re.search(r"^StorageError: Cannot write \S+/rollouts", ended.output, re.MULTILINE)
    assert "PeerError: process 0 of 2 failed: StorageError: Cannot write" in ended.output
    assert [row["step"] for row in metrics_of(run)] == [0]


def test_more_processes_than_prompts_are_refused(launcher):
    small = ("rollout.prompts_per_step=1", "rollout.group_size=2")
    ended = launcher.start("too-many", *small, processes=2).wait()

    assert ended.code != 0
    assert errors_in(ended.output) == ["ConfigError", "ConfigError"], ended.output
    assert "each of the 2 processes samples other prompts of a step" in ended.output
    assert re.search(r"exitcode +: 2 ", ended.output), ended.output
    assert not (launcher.folder / "too-many").exists()


def test_a_launch_through_deepspeed_is_refused_before_there_is_a_run_folder(launcher):
    ended = launcher.start("zero", env={"ACCELERATE_USE_DEEPSPEED": "true"}).wait()
    assert ended.code == 2
    assert "ConfigError: accelerate was started for DEEPSPEED: " in ended.output
    assert "use configs/accelerate/fsdp2.yaml" in ended.output
    assert not (launcher.folder / "zero").exists()
