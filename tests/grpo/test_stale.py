"""The loss over tokens that another policy sampled, or that the sampler scored differently."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from glm_grpo.grpo.losses import (
    LossInputs,
    corrected_kl_estimate,
    grpo_loss,
    measure_mismatch,
)
from glm_grpo.types import Experience
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
    ("weights", "expected"),
    [
        ("truncate", [0.5, 1.0, 2.0, 2.0]),
        ("mask", [0.5, 1.0, 2.0, 0.0]),
        ("none", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_importance_weights_are_those_worked_out_by_hand(weights, expected: list[float]) -> None:
    # Ratios of 0.5, 1, 2 and 4 under a limit of 2, which the third one just reaches.
    mismatch = measure_mismatch(
        torch.tensor([[math.log(0.5), 0.0, 0.69314718, math.log(4.0)]]),
        torch.zeros(1, 4),
        weights=weights,
        largest=2.0,
    )
    torch.testing.assert_close(mismatch.weights, torch.tensor([expected]))
    limited = [[False, False, False, True]]
    assert mismatch.metrics["mismatch/limited_fraction"].tolist() == limited
    # Metrics are of the ratios before any limit: 0.5, 2 and 4 are outside 0.8 to 1.2.
    outside = [[True, False, True, True]]
    assert mismatch.metrics["mismatch/outside_fraction"].tolist() == outside
    torch.testing.assert_close(
        mismatch.metrics["mismatch/ratio"], torch.tensor([[0.5, 1.0, 2.0, 4.0]]).double()
    )
    # KL(sampler || trainer) by k3: r - log r - 1.
    expected_kl = [0.5 + math.log(2) - 1, 0.0, 2 - math.log(2) - 1, 4 - math.log(4) - 1]
    torch.testing.assert_close(mismatch.metrics["mismatch/kl"], torch.tensor([expected_kl]))


def test_masking_leaves_out_tokens_on_both_sides_of_the_bounds() -> None:
    # Ratios of 0.25, 0.5, 2 and 4 between bounds of 0.4 and 3.
    mismatch = measure_mismatch(
        torch.tensor([[0.25, 0.5, 2.0, 4.0]]).log(),
        torch.zeros(1, 4),
        smallest=0.4,
        largest=3.0,
        weights="mask",
    )
    torch.testing.assert_close(mismatch.weights, torch.tensor([[0.0, 0.5, 2.0, 0.0]]))
    assert mismatch.metrics["mismatch/limited_fraction"].tolist() == [[True, False, False, True]]


def test_corrected_loss_is_that_worked_out_by_hand() -> None:
    # Sampled with 0.1 and 0.4, seen with 0.2 and 0.2 before the update, and with 0.22 and 0.3 now.
    # Ratios to the policy before the update: 1.1 (inside the clip) and 1.5 (clipped to 1.2 for an
    # advantage of 2). Weights 0.2 / 0.1 = 2 and 0.2 / 0.4 = 0.5.
    # Loss: -(2 * 1.1 * 2 + 0.5 * 1.2 * 2) / 2 = -2.8.
    loss = grpo_loss(
        LossInputs(
            log(0.22, 0.3),
            log(0.2, 0.2),
            None,
            torch.tensor([[2.0]]),
            sampling_log_probs=log(0.1, 0.4),
            importance_weights=torch.tensor([[2.0, 0.5]]),
        ),
        PLAIN,
    )
    assert loss.terms["loss/policy"].item() == pytest.approx(-2.8, rel=1e-5)
    # To the policy before the update, as the clip: 1.1 and 1.5.
    torch.testing.assert_close(loss.metrics["ratio/mean"], torch.tensor([[1.1, 1.5]]).double())
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
            log(0.2, 0.2),
            None,
            torch.tensor([[-1.0]]),
            sampling_log_probs=log(0.1, 0.4),
            importance_weights=torch.tensor([[2.0, 0.5]]),
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
    exact = measure_mismatch(proximal, sampled, largest=100.0, weights="truncate").weights
    estimate = corrected_kl_estimate(now, proximal, reference, exact)
    torch.testing.assert_close(estimate, torch.tensor([[1.5, 6.0]]) * k3)
    torch.testing.assert_close(estimate, corrected_kl_estimate(now, sampled, reference))
    limited = measure_mismatch(proximal, sampled, largest=2.0, weights="truncate").weights
    estimate = corrected_kl_estimate(now, proximal, reference, limited)
    torch.testing.assert_close(estimate, 1.5 * k3)


def test_correction_leaves_the_other_kl_terms_as_they_are() -> None:
    settings = clipped_loss(
        clip_low=0.2, clip_high=0.2, kl_coef=0.3, kl_estimator="k3", kl_behaviour_coef=0.7
    )
    now, sampled, reference = log(0.3, 0.3), log(0.2, 0.5), log(0.4, 0.1)
    advantages = torch.ones(1, 1)
    plain = grpo_loss(LossInputs(now, sampled, reference, advantages), settings)
    corrected = grpo_loss(
        LossInputs(
            now,
            log(0.25, 0.4),
            reference,
            advantages,
            sampling_log_probs=sampled,
            importance_weights=torch.tensor([[1.25, 0.8]]),
        ),
        settings,
    )
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
    advantages = torch.tensor([[1.0], [0.0], [0.0]])
    total = torch.zeros(())
    for entry in range(3):
        proximal = now.detach()[entry].reshape(1, 1)
        sampled = older.log()[entry].reshape(1, 1)
        mismatch = measure_mismatch(proximal, sampled, largest=100.0, weights="truncate")
        loss = grpo_loss(
            LossInputs(
                now[entry].reshape(1, 1),
                proximal,
                None,
                advantages[entry : entry + 1],
                sampling_log_probs=sampled,
                importance_weights=mismatch.weights,
            ),
            PLAIN,
        )
        total = total + older[entry] * loss.total
    (gradient,) = torch.autograd.grad(total, logits)
    p = now.detach().exp()
    expected = -p[0] * (torch.tensor([1.0, 0.0, 0.0]) - p)
    torch.testing.assert_close(gradient, expected)


def weights_of(experience: Experience) -> Tensor:
    """exp(log-prob now - log-prob as sampled), at most 2."""
    now = score(make_logits(), experience.rollout.token_ids)
    return (now - experience.rollout.log_probs).exp().clamp(max=2.0)


@pytest.mark.parametrize("is_stale", [True, False])
@pytest.mark.parametrize("micro_batch_size", [4, 6])
def test_update_moves_along_the_weighed_gradient(micro_batch_size: int, is_stale: bool) -> None:
    # An older policy, or the sampler of this one that computes something else.
    stale = replace(make_experience(make_logits(seed=7), ADVANTAGES), is_stale=is_stale)
    policy = TablePolicy(make_logits())
    (report,) = learn(policy, stale, changed(SETTINGS, micro_batch_size=micro_batch_size), 1.0)

    # Ratios are 1, so the gradient of the loss is -mean(weight * advantage * (onehot - softmax)).
    weights = weights_of(stale)
    onehot = nn.functional.one_hot(stale.rollout.token_ids, CODEBOOK).float()
    factor = weights * stale.advantages
    move = (factor[..., None] * (onehot - make_logits().softmax(-1))).sum((0, 1))
    expected = make_logits() + move / (PROMPTS * GROUP * TOKENS)
    torch.testing.assert_close(policy.logits.detach(), expected, atol=1e-6, rtol=1e-5)
    metrics = report.metrics
    assert metrics["ratio/mean"] == 1.0
    assert metrics["ratio/effective_sample_size"] == 1.0
    assert metrics["ratio/clip_fraction"] == 0.0
    ratios = (score(make_logits(), stale.rollout.token_ids) - stale.rollout.log_probs).exp()
    assert metrics["mismatch/ratio"] == pytest.approx(ratios.mean().item(), rel=1e-6)
    size = ratios.mean() ** 2 / ratios.square().mean()
    assert metrics["mismatch/effective_sample_size"] == pytest.approx(size.item(), rel=1e-5)
    limited = (ratios > 2.0).float().mean().item()
    assert 0 < limited == pytest.approx(metrics["mismatch/limited_fraction"])
    # What an older policy differs by is no gap of replay.
    gap = ratios.log().abs().mean().item()
    assert math.isnan(metrics["policy/replay_gap"]) == is_stale
    assert is_stale or metrics["policy/replay_gap"] == pytest.approx(gap, rel=1e-5)
    assert not report.is_skipped


def test_without_importance_weights_the_gradient_is_not_weighed() -> None:
    off = make_experience(make_logits(seed=7), ADVANTAGES)
    moved = []
    for experience in (off, make_experience(make_logits(), ADVANTAGES)):
        policy = TablePolicy(make_logits())
        learn(policy, experience, changed(SETTINGS, importance_weights="none"), 1.0)
        moved.append(policy.logits.detach())
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize("parts", [1, 2])
def test_ratios_of_all_updates_are_to_the_policy_before_the_first(parts: int) -> None:
    off = make_experience(make_logits(seed=7), ADVANTAGES)
    settings = changed(SETTINGS, epochs_per_rollout=2, minibatches=parts)
    policy = TablePolicy(make_logits())
    reports = learn(policy, off, settings, 1.0)

    # The same by hand, one prompt or both at a time.
    before = score(make_logits(), off.rollout.token_ids)
    expected = TablePolicy(make_logits())
    optimizer = torch.optim.SGD([expected.logits], lr=1.0)
    for prompts in ([[0, 1]] if parts == 1 else [[0], [1]]) * 2:
        now = score(expected.logits, off.rollout.token_ids)[prompts].flatten(0, 1)
        inputs = LossInputs(
            now,
            before[prompts].flatten(0, 1),
            None,
            ADVANTAGES[prompts].flatten()[:, None],
            importance_weights=weights_of(off)[prompts].flatten(0, 1),
        )
        optimizer.zero_grad()
        grpo_loss(inputs, settings.loss).total.backward()
        optimizer.step()
    torch.testing.assert_close(policy.logits.detach(), expected.logits.detach())
    assert reports[0].metrics["ratio/mean"] == 1.0
    assert all(report.metrics["ratio/mean"] != 1.0 for report in reports[1:])
    # The first pass over a rollout in one piece is its own: no sequence is replayed once more.
    assert len(policy.replayed) == PROMPTS * GROUP * (2 if parts == 1 else 2.5)
