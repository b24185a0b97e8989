"""Gradients of float16 are scaled so that they do not vanish, and computed again on overflow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from glm_grpo.grpo.loss_scale import LossScale
from glm_grpo.grpo.strategy import Strategy
from glm_grpo.grpo.update import UpdateReport, policy_gradient, update_policy
from tests.factories import changed
from tests.grpo.table_policy import (
    ADVANTAGES,
    SETTINGS,
    TablePolicy,
    learn,
    make_experience,
    make_learner,
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

    def table(self) -> Tensor:
        return Float16Gradient.apply(self.logits, self.factor)


def updated(factor: float, scale: LossScale) -> tuple[Tensor, UpdateReport]:
    policy = HalfPolicy(make_logits())
    policy.factor = factor
    learner = make_learner(policy, torch.optim.SGD([policy.logits], lr=1.0), Strategy(scale))
    (report,) = update_policy(learner, make_experience(make_logits(), ADVANTAGES), *SETTINGS)
    return policy.logits.detach(), report


def expected() -> Tensor:
    policy = TablePolicy(make_logits())
    learn(policy, make_experience(make_logits(), ADVANTAGES), SETTINGS, 1.0)
    return policy.logits.detach()


def test_a_gradient_too_small_for_float16_is_kept_by_the_scale() -> None:
    lost, report = updated(1e-8, LossScale())
    assert torch.equal(lost, make_logits())
    assert report.metrics["optim/grad_norm"] == 0.0
    found, report = updated(1e-8, LossScale(2.0**16, is_used=True))
    # To the precision of the smallest float16 numbers.
    torch.testing.assert_close(found, expected(), atol=1e-3, rtol=0)
    assert report.metrics["optim/loss_scale"] == 2.0**16
    exact = (expected() - make_logits()).norm().item()
    assert report.metrics["optim/grad_norm"] == pytest.approx(exact, rel=1e-2)


def test_a_gradient_that_overflows_is_computed_again_with_a_lower_scale() -> None:
    scale = LossScale(2.0**16, is_used=True)
    # The largest entries are about 0.1: times 2^16 and 100 they exceed 65,504.
    found, report = updated(100.0, scale)
    assert not report.is_skipped
    assert 1.0 < scale.value < 2.0**16
    torch.testing.assert_close(found, expected(), atol=1e-3, rtol=1e-3)


def test_a_gradient_that_overflows_at_any_scale_is_skipped() -> None:
    scale = LossScale(2.0**16, is_used=True)
    found, report = updated(math.inf, scale)
    assert report.is_skipped
    # No scale would have helped, so the next update begins with the same one.
    assert scale.value == 2.0**16
    assert torch.equal(found, make_logits())


@pytest.mark.parametrize("first", [1.0, 4.0])
def test_many_updates_without_overflow_raise_the_scale(first: float) -> None:
    scale = LossScale(first, is_used=True)
    for _ in range(199):
        scale.note_finite()
    assert (scale.value, scale.finite_updates) == (first, 199)
    scale.note_finite()
    assert (scale.value, scale.finite_updates) == (2 * first, 0)
    assert scale.lower()
    assert scale.value == max(1.0, first / 2)


def test_every_update_of_a_step_reports_the_scale_even_if_it_falls_to_1() -> None:
    policy = HalfPolicy(make_logits())
    scale = LossScale(4.0, is_used=True)
    learner = make_learner(policy, torch.optim.SGD([policy.logits], lr=1.0), Strategy(scale))
    # Finite in the first update; times 4 above 65,504 in the second.
    factors = iter([1.0, 3e5])
    settings = changed(SETTINGS, epochs_per_rollout=2)

    def count(done: int, total: int) -> None:
        policy.factor = next(factors, policy.factor)

    policy.factor = next(factors)
    reports = update_policy(
        learner, make_experience(make_logits(), ADVANTAGES), *settings, on_progress=count
    )
    assert [report.metrics["optim/loss_scale"] for report in reports] == [4.0, 1.0]
    assert reports[0].metrics.keys() == reports[1].metrics.keys()


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
        policy_gradient(TablePolicy(make_logits()), experience, *SETTINGS, loss_scale=scale)[0]
        for scale in (None, LossScale(1024.0, is_used=True))
    )
    torch.testing.assert_close(scaled, plain)
