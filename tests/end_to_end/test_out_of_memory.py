"""Memory that runs out in a step: what was learned before it is kept, and only that."""

from __future__ import annotations

import pytest
import torch

from glm_grpo.errors import MemoryLimitError
from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.terminal import explain
from tests.end_to_end.runs import Brightness

RUN = (
    "train.steps=4",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "train.micro_batch_size=4",
    "eval.samples_per_prompt=1",
)


def _ask_for_too_much():
    # 4 PB: torch's allocator is refused by the system.
    torch.empty(10**15)


@pytest.fixture
def make_run(make_trainer):
    """Builds a small run whose policy fails in one call of a method, from 1.

    Also returned is what the policy's weights were at each of these calls.
    """

    def build(*overrides, method="replay", fails_at):
        weights = []

        def change(models):
            real = getattr(models.policy, method)

            def failing(*arguments, **options):
                tensors = models.policy.state_tensors()
                weights.append({name: tensor.clone() for name, tensor in tensors.items()})
                if len(weights) == fails_at:
                    _ask_for_too_much()
                return real(*arguments, **options)

            setattr(models.policy, method, failing)
            return models

        trainer, _, run_dir = make_trainer(
            *(*RUN, *overrides), term=Brightness(), change_stage=change
        )
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
    assert message.endswith(
        f"Step 1 is saved; continue with glm-grpo train train.resume={folder.path}"
    )
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
    assert "in the rollout phase: 2 prompts x 2 images of 64 x 64 pixels, 8 tokens" in message
    assert "rollout.prompts_per_step, then rollout.group_size" in message
    assert message.endswith("Nothing was learned yet")
    assert newest_checkpoint(folder) is None
