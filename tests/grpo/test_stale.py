"""The loss over tokens of an older policy: tokens worked out by hand, and a policy of a table."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from glm_grpo.grpo.losses import (
    LossInputs,
    StaleTreatment,
    corrected_kl_estimate,
    grpo_loss,
    importance_weights,
)
from glm_grpo.types import Experience, OffPolicyCorrection
from tests.factories import changed, clipped_loss
from tests.grpo.table_policy import (
    ADVANTAGES,
    CODEBOOK,
    GROUP,
    PROMPTS,
    SETTINGS,
    TOKENS,
    TablePolicy,
    learn,
    make_experience,
    make_logits,
    score,
)

PLAIN = clipped_loss(
    clip_low=0.2, clip_high=0.2, kl_coef=0.0, kl_estimator="k3", kl_behaviour_coef=0.0
)


def log(*probabilities: float) -> Tensor:
    return torch.tensor([[math.log(value) for value in probabilities]])


@pytest.mark.parametrize(
    ("treatment", "expected"), [("truncate", [0.5, 1.0, 2.0, 2.0]), ("mask", [0.5, 1.0, 2.0, 0.0])]
)
def test_importance_weights_are_those_worked_out_by_hand(
    treatment: StaleTreatment, expected: list[float]
) -> None:
    # Ratios of 0.5, 1, 2 and 4 under a limit of 2, which the third one just reaches.
    weights = importance_weights(
        torch.tensor([[math.log(0.5), 0.0, 0.69314718, math.log(4.0)]]),
        torch.zeros(1, 4),
        largest=2.0,
        treatment=treatment,
    )
    torch.testing.assert_close(weights, torch.tensor([expected]))


def test_dropping_leaves_out_tokens_on_both_sides_of_the_bounds() -> None:
    # Ratios of 0.25, 0.5, 2 and 4 between bounds of 0.4 and 3.
    weights = importance_weights(
        torch.tensor([[0.25, 0.5, 2.0, 4.0]]).log(),
        torch.zeros(1, 4),
        smallest=0.4,
        largest=3.0,
        treatment="mask",
    )
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.5, 2.0, 0.0]]))


def test_corrected_loss_is_that_worked_out_by_hand() -> None:
    # Sampled with 0.1 and 0.4, seen with 0.2 and 0.2 before the update, and with 0.22 and 0.3 now.
    # Ratios to the policy before the update: 1.1 (inside the clip) and 1.5 (clipped to 1.2 for an
    # advantage of 2). Weights 0.2 / 0.1 = 2 and 0.2 / 0.4 = 0.5.
    # Loss: -(2 * 1.1 * 2 + 0.5 * 1.2 * 2) / 2 = -2.8.
    loss = grpo_loss(
        LossInputs(
            log(0.22, 0.3),
            log(0.1, 0.4),
            None,
            torch.tensor([2.0]),
            OffPolicyCorrection(log(0.2, 0.2), torch.tensor([[2.0, 0.5]])),
        ),
        PLAIN,
    )
    assert loss.terms["loss/policy"].item() == pytest.approx(-2.8, rel=1e-5)
    # To the policy that sampled: 0.22 / 0.1 and 0.3 / 0.4.
    torch.testing.assert_close(loss.metrics["ratio/mean"], torch.tensor([[2.2, 0.75]]).double())
    # Of the clip: log 1.1 and log 1.5 to the policy before the update.
    torch.testing.assert_close(
        loss.metrics["ratio/sequence_log"], torch.tensor([1.1 * 1.5]).log().double() / 2
    )
    assert loss.metrics["ratio/clip_fraction"].tolist() == [[False, True]]


def test_corrected_loss_for_a_negative_advantage_is_clipped_below() -> None:
    # As above with an advantage of -1 and present probabilities of 0.1 and 0.22: ratios 0.5
    # (clipped to 0.8) and 1.1. Loss: (2 * 0.8 + 0.5 * 1.1) / 2 = 1.075.
    loss = grpo_loss(
        LossInputs(
            log(0.1, 0.22),
            log(0.1, 0.4),
            None,
            torch.tensor([-1.0]),
            OffPolicyCorrection(log(0.2, 0.2), torch.tensor([[2.0, 0.5]])),
        ),
        PLAIN,
    )
    assert loss.terms["loss/policy"].item() == pytest.approx(1.075, rel=1e-5)
    assert loss.metrics["ratio/clip_fraction"].tolist() == [[True, False]]


def test_corrected_kl_is_to_the_policy_that_sampled_within_the_limit_of_the_weights() -> None:
    # Now 0.3 and 0.3, proximal 0.25 and 0.4, sampled at 0.2 and 0.05: ratios 1.5 and 6 to the
    # policy that sampled; with weights of at most 2: 1.5 and 2 * 0.75 = 1.5.
    now, sampled, reference = log(0.3, 0.3), log(0.2, 0.05), log(0.6, 0.15)
    proximal = log(0.25, 0.4)
    k3 = torch.tensor([[2 - math.log(2) - 1, 0.5 + math.log(2) - 1]])
    exact = importance_weights(proximal, sampled, largest=100.0, treatment="truncate")
    estimate = corrected_kl_estimate(now, sampled, reference, OffPolicyCorrection(proximal, exact))
    torch.testing.assert_close(estimate, torch.tensor([[1.5, 6.0]]) * k3)
    torch.testing.assert_close(estimate, corrected_kl_estimate(now, sampled, reference))
    limited = importance_weights(proximal, sampled, largest=2.0, treatment="truncate")
    estimate = corrected_kl_estimate(
        now, sampled, reference, OffPolicyCorrection(proximal, limited)
    )
    torch.testing.assert_close(estimate, 1.5 * k3)


def test_correction_leaves_the_other_kl_terms_as_they_are() -> None:
    settings = clipped_loss(
        clip_low=0.2, clip_high=0.2, kl_coef=0.3, kl_estimator="k3", kl_behaviour_coef=0.7
    )
    now, sampled, reference = log(0.3, 0.3), log(0.2, 0.5), log(0.4, 0.1)
    advantages = torch.tensor([1.0])
    plain = grpo_loss(LossInputs(now, sampled, reference, advantages), settings)
    correction = OffPolicyCorrection(log(0.25, 0.4), torch.tensor([[1.25, 0.8]]))
    corrected = grpo_loss(LossInputs(now, sampled, reference, advantages, correction), settings)
    assert corrected.terms["loss/kl"].item() == plain.terms["loss/kl"].item()
    assert corrected.metrics["kl/behaviour"].item() == plain.metrics["kl/behaviour"].item()
    assert corrected.terms["loss/policy"].item() != plain.terms["loss/policy"].item()


def test_gradient_of_corrected_loss_is_the_policy_gradient_of_older_samples() -> None:
    """Before the first update, sampling from the older policy and weighing gives the gradient.

    The expectation over the older policy q of (p / q) A grad log p is the one over p of A grad
    log p; here as an exact sum over a codebook of three, with A = 1 for the first entry alone.
    """
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    older = torch.tensor([0.6, 0.3, 0.1])
    now = logits.log_softmax(0)
    advantages = torch.tensor([1.0, 0.0, 0.0])
    total = torch.zeros(())
    for entry in range(3):
        proximal = now.detach()[entry].reshape(1, 1)
        sampled = older.log()[entry].reshape(1, 1)
        weights = importance_weights(proximal, sampled, largest=100.0, treatment="truncate")
        loss = grpo_loss(
            LossInputs(
                now[entry].reshape(1, 1),
                sampled,
                None,
                advantages[entry : entry + 1],
                OffPolicyCorrection(proximal, weights),
            ),
            PLAIN,
        )
        total = total + older[entry] * loss.total
    (gradient,) = torch.autograd.grad(total, logits)
    p = now.detach().exp()
    expected = -p[0] * (torch.tensor([1.0, 0.0, 0.0]) - p)
    torch.testing.assert_close(gradient, expected)


def correct(experience: Experience) -> OffPolicyCorrection:
    proximal = score(make_logits(), experience.rollout.token_ids)
    old = experience.rollout.log_probs
    weights = importance_weights(proximal, old, largest=2.0, treatment="truncate")
    return OffPolicyCorrection(proximal, weights)


@pytest.mark.parametrize("micro_batch_size", [4, 6])
def test_update_moves_along_the_weighed_gradient(micro_batch_size: int) -> None:
    stale = make_experience(make_logits(seed=7), ADVANTAGES)
    stale = replace(stale, correction=correct(stale))
    policy = TablePolicy(make_logits())
    (report,) = learn(policy, stale, changed(SETTINGS, micro_batch_size=micro_batch_size), 1.0)

    # Ratios are 1, so the gradient of the loss is -mean(weight * advantage * (onehot - softmax)).
    assert stale.correction is not None
    onehot = nn.functional.one_hot(stale.rollout.token_ids, CODEBOOK).float()
    factor = stale.correction.weights * stale.advantages.values[..., None]
    move = (factor[..., None] * (onehot - make_logits().softmax(-1))).sum((0, 1))
    expected = make_logits() + move / (PROMPTS * GROUP * TOKENS)
    torch.testing.assert_close(policy.logits.detach(), expected, atol=1e-6, rtol=1e-5)
    weights = stale.correction.weights
    assert report.metrics["ratio/mean"] == pytest.approx(weights.mean().item(), rel=1e-6)
    size = weights.mean() ** 2 / weights.square().mean()
    assert report.metrics["ratio/effective_sample_size"] == pytest.approx(size.item(), rel=1e-5)
    assert report.metrics["ratio/clip_fraction"] == 0.0
    # The policy has moved on: what it misses of the samples is no gap of replay.
    assert math.isnan(report.metrics["policy/replay_gap"])
    assert not report.is_skipped
