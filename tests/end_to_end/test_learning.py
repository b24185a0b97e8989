"""The loop learns what it is paid for."""

from __future__ import annotations

import dataclasses

import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from tests.end_to_end.runs import Brightness


def test_loop_follows_the_sign_of_the_reward(make_run):
    trainer, _, folder = make_run(
        *("rollout.group_size=8", "rollout.temperature=2", "train.steps=8"),
        *("train.micro_batch_size=32", "optim.learning_rate=1e-3", "loss.kl_coef=0"),
        term=Brightness(),
        weight=-1.0,
    )

    trainer.run()

    _, first, *_, last = read_metrics(folder)
    change = last["reward/brightness/mean"] - first["reward/brightness/mean"]
    assert change < -0.1


def same_prompts(batch_for_step):
    """Every step has the prompts of the first, and samples anew."""
    return lambda at: dataclasses.replace(batch_for_step(1), seed=at - 1)


class TestTrueSize:
    """With the preview that the embedded model was trained for."""

    @pytest.fixture
    def small_preview(self):
        """None here."""

    def test_a_run_learns(self, make_trainer):
        trainer, _, run_dir = make_trainer(
            *("rollout.prompts_per_step=1", "rollout.group_size=8", "rollout.temperature=1.5"),
            *("train.steps=3", "optim.learning_rate=1e-3", "loss.kl_coef=0"),
            term=Brightness(),
            change_batch=same_prompts,
            held_out=1,
        )

        trainer.run()

        _, first, *_, last = read_metrics(RunFolder(run_dir))
        assert last["reward/brightness/mean"] > first["reward/brightness/mean"] + 0.05
