"""Memory that runs out in a step: what was learned before it is kept, and only that."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm_grpo.errors import MemoryLimitError
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.terminal import explain
from glm_grpo.training.checkpoint.files import load_checkpoint, newest_checkpoint
from rewards.score import Scorer, Term

CONFIGS = Path(__file__).parents[2] / "configs"

RUN = (
    "train.steps=4",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "train.micro_batch_size=4",
    "eval.samples_per_prompt=1",
)


class Brightness:
    def applies_to(self, prompt):
        return True

    def score(self, prompts, pixels):
        return pixels.float().mean(dim=(1, 2, 3)) / 255

    def modules(self):
        return ()


def _ask_for_too_much():
    # 4 PB: torch's allocator is refused by the system.
    torch.empty(10**15)


def _mismatch():
    torch.ones(2, 3) @ torch.ones(2, 3)


@pytest.fixture
def make_run(make_trainer):
    """Builds a small run whose policy fails in one call of a method, from 1.

    Also returned is what the policy's weights were at each of these calls.
    """

    def build(*overrides, method="replay", fails_at, fail=_ask_for_too_much):
        weights = []

        def change(models):
            real = getattr(models.policy, method)

            def failing(*arguments, **options):
                tensors = models.policy.state_tensors()
                weights.append({name: tensor.clone() for name, tensor in tensors.items()})
                if len(weights) == fails_at:
                    fail()
                return real(*arguments, **options)

            setattr(models.policy, method, failing)
            scorer = Scorer([Term("brightness", Brightness(), 1.0)])
            return dataclasses.replace(models, scorer=scorer)

        trainer, _, run_dir = make_trainer(*(*RUN, *overrides), change_stage=change, held_out=2)
        return trainer, RunFolder(run_dir), weights

    return build


def _are_equal(tensors, others):
    return all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


# The first replay is the self-check's; with two updates a step, the fourth and fifth are step 2's.
TWO_UPDATES = "train.updates_per_rollout=2"


def test_memory_that_runs_out_in_an_update_leaves_the_step_before_it(make_run):
    trainer, folder, weights = make_run(TWO_UPDATES, fails_at=4)
    with pytest.raises(MemoryLimitError) as caught:
        trainer.run()
    message = explain(caught.value)
    assert message.startswith(
        "MemoryLimitError: out of memory in the update phase: 4 of 4 images at a time"
    )
    assert "train.micro_batch_size" in message
    assert message.endswith(f"Step 1 is saved; go on with train.resume={folder.path}")
    checkpoint = load_checkpoint(newest_checkpoint(folder))
    assert checkpoint.step == 1
    assert _are_equal(checkpoint.tensors["policy"], weights[3])
    assert [row["step"] for row in read_metrics(folder)] == [0, 1]
    assert folder.gallery_path.is_file()


def test_weights_that_began_to_change_are_not_saved_under_the_step_before(make_run):
    trainer, folder, weights = make_run(TWO_UPDATES, fails_at=5)
    with pytest.raises(MemoryLimitError, match="The weights of step 1 had begun to change"):
        trainer.run()
    assert not _are_equal(weights[3], weights[4])
    assert newest_checkpoint(folder) is None


def test_memory_that_runs_out_while_sampling_names_the_rollout(make_run):
    # Prompts are encoded once a batch: the first is the evaluation's.
    trainer, folder, _ = make_run(method="encode", fails_at=2)
    with pytest.raises(MemoryLimitError) as caught:
        trainer.run()
    message = explain(caught.value)
    assert "in the rollout phase: 2 prompts x 2 images of 128 x 128 pixels, 272 tokens" in message
    assert "rollout.prompts_per_step, then rollout.group_size" in message
    assert message.endswith("Nothing was learned yet")
    assert newest_checkpoint(folder) is None


def test_memory_that_runs_out_in_an_evaluation_names_it(make_run):
    trainer, folder, _ = make_run(method="encode", fails_at=1)
    with pytest.raises(MemoryLimitError, match="in the evaluation phase.*eval.samples_per_prompt"):
        trainer.run()
    assert read_metrics(folder) == []


def test_other_errors_end_a_run_as_they_are(make_run):
    trainer, _, _ = make_run(fails_at=1, fail=_mismatch)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        trainer.run()
    assert type(caught.value) is RuntimeError


SHORT_OF_MEMORY = """
import resource, sys
from pathlib import Path
import glm_grpo.training.loop as loop
from glm_grpo.commands.train import run_training
from glm_grpo.config import compose_config
from glm_grpo.terminal import errors_explained

update_policy, steps = loop.update_policy, []

def short_of_memory(*arguments):
    steps.append(len(steps) + 1)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    if steps[-1] == 2:
        resource.setrlimit(resource.RLIMIT_AS, (taken + 100_000_000, unlimited[1]))
    try:
        return update_policy(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)

loop.update_policy = short_of_memory
with errors_explained("the run"):
    run_training(compose_config(Path(sys.argv[1]), "tiny", sys.argv[2:]))
"""


def test_a_process_that_may_take_no_more_memory_ends_with_a_message_and_a_checkpoint(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red sign\na blue sign\n")
    run_dir = tmp_path / "run"
    result = subprocess.run(
        [
            *(sys.executable, "-c", SHORT_OF_MEMORY, str(CONFIGS)),
            *(f"data.path={prompts}", f"data.eval_path={prompts}", "eval.samples_per_prompt=1"),
            *("rollout.prompts_per_step=2", "rollout.group_size=4", "train.micro_batch_size=8"),
            *("~reward.terms.lpips", "~reward.terms.ssim", "~reward.terms.ocr", "reward.watch=[]"),
            *("reward.allow_untied=true", "decode.steps=1", "trackers=[]", f"run_dir={run_dir}"),
        ],
        # Freed memory goes back to the system, lest the second step live on what the first had.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "MemoryLimitError: out of memory in the update phase: 8 of 8 images" in result.stderr
    assert "more were asked for" in result.stderr
    newest = newest_checkpoint(RunFolder(run_dir))
    assert load_checkpoint(newest).step == 1
