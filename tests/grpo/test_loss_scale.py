"""Gradients of float16 are scaled so that they do not vanish, and computed again on overflow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from glm_grpo.grpo.loss_scale import LossScale
from glm_grpo.grpo.policy import Replay
from glm_grpo.grpo.strategy import Strategy
from glm_grpo.grpo.update import Trainee, UpdateReport, policy_gradient, update_policy
from glm_grpo.types import PromptBatch, Rollout
from tests.grpo.table_policy import (
    ADVANTAGES,
    SETTINGS,
    ConstantRate,
    TablePolicy,
    learn,
    make_experience,
    make_logits,
)


class Float16Gradient(torch.autograd.Function):
    """Passes values on, and gradients as float16 keeps them.

    What it multiplies them by on the way stands for the layers below.
    """

    @staticmethod
    def forward(ctx, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return (gradient.half() * ctx.factor).float() / ctx.factor, None


class HalfPolicy(TablePolicy):
    """Its gradients go through float16, times a factor."""

    factor = 1.0
    dtype = torch.float16

    def replay(self, prompts: PromptBatch, rollout: Rollout, rows: Tensor) -> Replay:
        kept = self.logits
        self.logits = Float16Gradient.apply(kept, self.factor)
        try:
            return super().replay(prompts, rollout, rows)
        finally:
            self.logits = kept


def updated(factor: float, scale: LossScale) -> tuple[Tensor, UpdateReport]:
    policy = HalfPolicy(make_logits())
    policy.factor = factor
    trainee = Trainee(
        policy, torch.optim.SGD([policy.logits], lr=1.0), ConstantRate(), Strategy(scale)
    )
    (report,) = update_policy(trainee, make_experience(make_logits(), ADVANTAGES), SETTINGS)
    return policy.logits.detach(), report


def expected() -> Tensor:
    policy = TablePolicy(make_logits())
    learn(policy, make_experience(make_logits(), ADVANTAGES), SETTINGS, 1.0)
    return policy.logits.detach()


def test_a_gradient_too_small_for_float16_is_kept_by_the_scale() -> None:
    lost, report = updated(1e-8, LossScale())
    assert torch.equal(lost, make_logits())
    assert report.metrics["optim/grad_norm"] == 0.0
    found, report = updated(1e-8, LossScale(2.0**16))
    # To the precision of the smallest float16 numbers.
    torch.testing.assert_close(found, expected(), atol=1e-3, rtol=0)
    assert report.metrics["optim/loss_scale"] == 2.0**16
    exact = (expected() - make_logits()).norm().item()
    assert report.metrics["optim/grad_norm"] == pytest.approx(exact, rel=1e-2)


def test_a_gradient_that_overflows_is_computed_again_with_a_lower_scale() -> None:
    scale = LossScale(2.0**16)
    # The largest entries are about 0.1: times 2^16 and 100 they exceed 65,504.
    found, report = updated(100.0, scale)
    assert not report.is_skipped
    assert 1.0 < scale.value < 2.0**16
    torch.testing.assert_close(found, expected(), atol=1e-3, rtol=1e-3)


def test_a_gradient_that_overflows_at_any_scale_is_skipped() -> None:
    scale = LossScale(2.0**16)
    found, report = updated(math.inf, scale)
    assert report.is_skipped
    assert scale.value == 1.0
    assert torch.equal(found, make_logits())


def test_many_updates_without_overflow_raise_the_scale() -> None:
    scale = LossScale(4.0)
    for _ in range(199):
        scale.note_finite()
    assert scale == LossScale(4.0, 199)
    scale.note_finite()
    assert scale == LossScale(8.0, 0)
    assert scale.lower()
    assert scale == LossScale(2.0, 0)


def test_other_dtypes_are_not_scaled() -> None:
    assert LossScale.for_dtype(torch.bfloat16) == LossScale.for_dtype(torch.float32) == LossScale()
    assert LossScale.for_dtype(torch.float16).value == 2.0**16
    unscaled = LossScale()
    unscaled.note_finite()
    assert unscaled == LossScale()
    assert not unscaled.lower()


def test_the_gradient_of_a_probe_is_unscaled() -> None:
    experience = make_experience(make_logits(), ADVANTAGES)
    plain, scaled = (
        policy_gradient(TablePolicy(make_logits()), experience, SETTINGS, loss_scale=scale)[0]
        for scale in (None, LossScale(1024.0))
    )
    torch.testing.assert_close(scaled, plain)
