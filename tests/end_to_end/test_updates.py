"""What single updates of the loop do, as its metrics and weights show."""

from __future__ import annotations

import pytest
import torch

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from tests.end_to_end.runs import Brightness


def weights_of(models):
    return {name: tensor.clone() for name, tensor in models.policy.state_tensors().items()}


def has_changed(models, before):
    after = models.policy.state_tensors()
    return any(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    "overrides",
    [
        # KL terms to the policy itself have gradients of rounding errors, which Adam blows up:
        # prompts of other lengths share blocks in minibatches, and so are padded otherwise.
        [
            *("loss.kl_coef=0.1", "loss.kl_placement=reward", "advantage.std_floor=1e-9"),
            *("loss.kl_behaviour_coef=0.1", "train.minibatches_per_rollout=2"),
            "train.micro_batch_size=12",
        ],
        [
            *("loss.kl_coef=0.1", "loss.kl_behaviour_coef=0.1", "train.updates_per_rollout=2"),
            "+model.adapter={rank: 4, alpha: 8.0}",
        ],
    ],
    ids=["kl_in_the_reward", "kl_in_the_loss_of_adapters"],
)
def test_loop_changes_no_weight_where_all_rewards_are_equal(make_trainer, overrides):
    trainer, models, run_dir = make_trainer(
        "train.steps=1",
        "rollout.prompts_per_step=6",
        "optim.weight_decay=0.1",
        *overrides,
        term=Brightness(lambda scores, _: torch.full_like(scores, 0.25)),
    )
    before = weights_of(models)

    trainer.run()

    assert not has_changed(models, before)
    assert read_metrics(RunFolder(run_dir))[-1]["advantage/flat_fraction"] == 1.0


def test_later_updates_of_a_rollout_leave_the_sampling_policy(make_trainer):
    trainer, _, run_dir = make_trainer(
        "train.steps=1", "train.updates_per_rollout=3", term=Brightness()
    )

    trainer.run()

    row = read_metrics(RunFolder(run_dir))[-1]
    assert row["kl/behaviour"] > 0
    assert row["policy/replay_gap"] < 1e-4


def test_kl_in_the_reward_moves_the_advantages_and_not_the_loss(make_trainer):
    trainer, _, run_dir = make_trainer(
        "train.steps=2", "loss.kl_placement=reward", "loss.kl_coef=0.5", term=Brightness()
    )

    trainer.run()

    rows = read_metrics(RunFolder(run_dir))[1:]
    assert rows[-1]["kl/reference"] > 0
    # The only update of a rollout is on-policy.
    for row in rows:
        assert row["loss/kl"] == 0.0
        assert row["loss/policy"] == pytest.approx(0.0, abs=1e-5)
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["ratio/clip_fraction"] == 0.0
        assert row["policy/replay_gap"] < 1e-4
