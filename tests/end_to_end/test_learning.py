"""The loop learns what it is paid for, and nothing where it is paid for nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from rewards.score import Scorer, Term

LEARNING = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=8",
    "train.micro_batch_size=32",
    "train.steps=16",
    "loss.kl_coef=0",
    "reward.terms.lpips=null",
    "reward.terms.ocr=null",
    "reward.terms.aesthetic=null",
)
"""Structural similarity alone: cheap to score, and the embedded model has much to gain in it."""

# Sixteen steps: a minute on an idle machine, several beside other work.
pytestmark = pytest.mark.timeout(900)


class ConstantReward:
    """Pays the same for every picture."""

    def applies_to(self, prompt):
        return True

    def score(self, prompts, pixels):
        return torch.full((len(prompts),), 0.25)

    def modules(self):
        return ()


def weights_of(models):
    return {name: tensor.clone() for name, tensor in models.policy.state_tensors().items()}


def has_changed(models, before):
    after = models.policy.state_tensors()
    return any(not torch.equal(after[name], before[name]) for name in before)


def evaluations(run_dir):
    rows = [row for row in read_metrics(RunFolder(run_dir)) if "eval/total" in row]
    return rows[0]["eval/total"], rows[-1]["eval/total"]


@pytest.mark.parametrize(("weight", "direction"), [(1.0, 1), (-1.0, -1)])
def test_loop_follows_the_sign_of_the_reward(make_trainer, weight, direction):
    trainer, _, run_dir = make_trainer(*LEARNING, f"reward.terms.ssim.weight={weight}", held_out=16)

    trainer.run()

    # The total is the similarity times its weight: with -1, learning lowers the similarity.
    before, after = (total / weight for total in evaluations(run_dir))
    assert direction * (after - before) > 0


def test_loop_changes_no_weight_where_all_rewards_are_equal(make_trainer):
    def pay_the_same(models):
        return dataclasses.replace(models, scorer=Scorer([Term("constant", ConstantReward(), 1.0)]))

    trainer, models, run_dir = make_trainer(
        "train.steps=2",
        "loss.kl_coef=0",
        "optim.weight_decay=0.1",
        change_stage=pay_the_same,
    )
    before = weights_of(models)

    trainer.run()

    assert not has_changed(models, before)
    assert read_metrics(RunFolder(run_dir))[-1]["advantage/flat_fraction"] == 1.0


def test_loop_stays_near_the_reference_under_a_heavy_kl(make_trainer):
    trainer, models, run_dir = make_trainer("train.steps=4", "loss.kl_coef=10")
    before = weights_of(models)

    trainer.run()

    divergences = [row["kl/reference"] for row in read_metrics(RunFolder(run_dir))[1:]]
    assert has_changed(models, before)
    assert all(0 <= divergence < 0.01 for divergence in divergences)


def test_first_update_of_a_rollout_is_on_policy(make_trainer):
    trainer, _, run_dir = make_trainer("train.steps=2")

    trainer.run()

    for row in read_metrics(RunFolder(run_dir))[1:]:
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["ratio/clip_fraction"] == 0.0
        assert row["loss/policy"] == pytest.approx(0.0, abs=1e-5)
        assert row["policy/replay_gap"] < 1e-4


def test_later_updates_of_a_rollout_leave_the_sampling_policy(make_trainer):
    trainer, _, run_dir = make_trainer("train.steps=1", "train.updates_per_rollout=3")

    trainer.run()

    row = read_metrics(RunFolder(run_dir))[-1]
    assert row["kl/behaviour"] > 0
    assert row["policy/replay_gap"] < 1e-4


def test_kl_in_the_reward_moves_the_advantages_and_not_the_loss(make_trainer):
    trainer, _, run_dir = make_trainer(
        "train.steps=2", "loss.kl_placement=reward", "loss.kl_coef=0.5"
    )

    trainer.run()

    row = read_metrics(RunFolder(run_dir))[-1]
    assert row["loss/kl"] == 0.0
    assert row["kl/reference"] > 0
    assert row["loss/policy"] == pytest.approx(0.0, abs=1e-5)
