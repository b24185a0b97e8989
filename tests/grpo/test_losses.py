"""Expected values are worked out by hand beside each test."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from glm_grpo.config.losses import KlEstimator, LossKlEstimator
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.grpo.losses import (
    LossInputs,
    corrected_kl_estimate,
    effective_sample_size,
    grpo_loss,
    kl_estimate,
    reference_penalty,
)
from glm_grpo.grpo.surrogates import clipped_surrogate
from tests.factories import clipped_loss

SURROGATE_ONLY = clipped_loss(
    clip_low=0.2, clip_high=0.3, kl_coef=0.0, kl_estimator="k3", kl_behaviour_coef=0.0
)


def gradient_of(loss: Tensor, at: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss.sum(), at)
    return gradient


def log(*values: float) -> Tensor:
    return torch.tensor([[math.log(value) for value in values]])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Policy 0.5, reference 0.25: d = -log 2.
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 + math.log(2) - 1),
    ],
)
def test_kl_estimate_matches_its_formula(estimator: KlEstimator, expected: float) -> None:
    actual = kl_estimate(log(0.5), log(0.25), estimator=estimator)
    torch.testing.assert_close(actual, torch.tensor([[expected]]))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimate_is_unbiased_for_the_kl_of_policy_to_reference(estimator: KlEstimator) -> None:
    # The expectation over a die of three sides, term by term: the exact KL(policy || reference).
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = 0.5 * math.log(2.5) + 0.3 * math.log(1.5) + 0.2 * math.log(1 / 3)
    estimates = kl_estimate(policy.log(), reference.log(), estimator=estimator)
    assert (policy * estimates).sum().item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_estimate_is_never_negative(estimator: KlEstimator) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = -4 * torch.rand(1000, generator=generator)
    gaps = torch.logspace(-9, 0.5, 1000)
    for sign in (-1, 1):
        estimates = kl_estimate(log_probs, log_probs + sign * gaps, estimator=estimator)
        assert (estimates >= 0).all()


def test_k3_keeps_its_digits_where_policy_and_reference_nearly_agree() -> None:
    # d = 1e-4: d^2 / 2 = 5e-9 (1 + d / 3), far below the resolution of exp(d) - 1 in float32.
    estimate = kl_estimate(torch.zeros(1), torch.full((1,), 1e-4), estimator="k3")
    assert estimate.item() == pytest.approx(5e-9, rel=0.01)


def test_k1_has_no_expected_gradient_on_policy_and_k2_that_of_the_kl() -> None:
    reference = torch.tensor([0.2, 0.2, 0.6]).log()

    def expected_gradient(estimator: KlEstimator) -> Tensor:
        logits = torch.tensor([0.4, -0.1, 0.3], requires_grad=True)
        log_probs = logits.log_softmax(0)
        estimates = kl_estimate(log_probs, reference, estimator=estimator)
        return gradient_of(log_probs.exp().detach() * estimates, logits)

    logits = torch.tensor([0.4, -0.1, 0.3], requires_grad=True)
    log_probs = logits.log_softmax(0)
    exact = gradient_of(log_probs.exp() * (log_probs - reference), logits)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(expected_gradient("k2"), exact)


def test_corrected_kl_is_k3_times_the_ratio_and_its_gradient_k2s_times_the_ratio() -> None:
    # Policy 0.5, sampled at 0.25: ratio 2. References 0.25 and 1.0, below and above:
    # k3 = 0.5 + log 2 - 1 and 2 - log 2 - 1; gradient: 2 * (log 0.5 - log reference).
    log_probs = log(0.5, 0.5).requires_grad_()
    estimate = corrected_kl_estimate(log_probs, log(0.25, 0.25), log(0.25, 1.0))
    expected = torch.tensor([[2 * (math.log(2) - 0.5), 2 * (1 - math.log(2))]])
    torch.testing.assert_close(estimate, expected)
    expected = torch.tensor([[2 * math.log(2), -2 * math.log(2)]])
    torch.testing.assert_close(gradient_of(estimate, log_probs), expected)


def expected_loss_gradient(estimator: LossKlEstimator, sampling: Tensor) -> tuple[Tensor, Tensor]:
    """Over a die of three sides thrown by `sampling`: of the KL in the loss, and of the KL."""
    reference = torch.tensor([0.2, 0.2, 0.6]).log()
    settings = clipped_loss(
        clip_low=0.2, clip_high=0.2, kl_coef=1.0, kl_estimator=estimator, kl_behaviour_coef=0.0
    )
    logits = torch.tensor([0.4, -0.1, 0.3], requires_grad=True)
    policy = logits.log_softmax(0)
    losses = [
        grpo_loss(
            LossInputs(
                policy[side].reshape(1, 1),
                sampling[side].log().reshape(1, 1),
                reference[side].reshape(1, 1),
                torch.zeros(1, 1),
            ),
            settings,
        ).total
        for side in range(3)
    ]
    actual = gradient_of(sampling * torch.stack(losses), logits)
    policy = logits.log_softmax(0)
    return actual, gradient_of(policy.exp() * (policy - reference), logits)


def test_only_k3_corrected_has_the_gradient_of_the_kl_whoever_sampled() -> None:
    policy = torch.tensor([0.4, -0.1, 0.3]).softmax(0)
    another = torch.tensor([0.7, 0.2, 0.1])
    for sampling in (policy, another):
        actual, exact = expected_loss_gradient("k3_corrected", sampling)
        torch.testing.assert_close(actual, exact)
    # On-policy k2's is the same; k3's is that of KL(reference || policy): policy - reference.
    actual, exact = expected_loss_gradient("k2", policy)
    torch.testing.assert_close(actual, exact)
    actual, exact = expected_loss_gradient("k3", policy)
    torch.testing.assert_close(actual, policy - torch.tensor([0.2, 0.2, 0.6]))
    assert (actual - exact).abs().max() > 0.01
    # The others take the tokens of another policy for their own.
    for estimator in ("k2", "k3"):
        actual, exact = expected_loss_gradient(estimator, another)
        assert (actual - exact).abs().max() > 0.05


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped", "gradient"),
    [
        # Bounds 0.8 and 1.3. Gradient of the loss to the log-prob: -ratio * advantage, or 0.
        (1.0, 2.0, -2.0, False, -2.0),
        (1.2, 2.0, -2.4, False, -2.4),
        (1.5, 2.0, -2.6, True, 0.0),
        (0.5, 2.0, -1.0, False, -1.0),
        (1.0, -2.0, 2.0, False, 2.0),
        (0.9, -2.0, 1.8, False, 1.8),
        (0.5, -2.0, 1.6, True, 0.0),
        (1.5, -2.0, 3.0, False, 3.0),
        (1.5, 0.0, 0.0, False, 0.0),
        (0.5, 0.0, 0.0, False, 0.0),
    ],
)
def test_clipped_surrogate_on_both_sides_for_both_signs(
    ratio: float, advantage: float, loss: float, is_clipped: bool, gradient: float
) -> None:
    old_log_probs = log(0.1)
    log_probs = log(0.1 * ratio).requires_grad_()
    surrogate = clipped_surrogate(
        log_probs, old_log_probs, torch.tensor([[advantage]]), clip_low=0.2, clip_high=0.3
    )
    actual_gradient = gradient_of(surrogate.loss, log_probs)
    assert surrogate.loss.item() == pytest.approx(loss, rel=1e-5)
    assert surrogate.ratio.item() == pytest.approx(ratio, rel=1e-5)
    assert surrogate.is_clipped.tolist() == [[is_clipped]]
    assert actual_gradient.item() == pytest.approx(gradient, rel=1e-5)


def test_clipped_surrogate_gives_each_sequence_its_own_advantage() -> None:
    zeros = torch.zeros(2, 3)
    surrogate = clipped_surrogate(
        zeros, zeros, torch.tensor([[1.0], [-3.0]]), clip_low=0.2, clip_high=0.2
    )
    assert surrogate.loss.tolist() == [[-1.0] * 3, [3.0] * 3]


def test_grpo_loss_adds_policy_and_both_kl_terms_by_their_weights() -> None:
    settings = clipped_loss(
        clip_low=0.2, clip_high=0.2, kl_coef=0.5, kl_estimator="k2", kl_behaviour_coef=2.0
    )
    # Policy 0.5, sampled at 0.4 (ratio 1.25), reference 0.25, advantage -1: loss 1.25, unclipped.
    loss = grpo_loss(LossInputs(log(0.5), log(0.4), log(0.25), torch.tensor([[-1.0]])), settings)
    k2 = math.log(2) ** 2 / 2
    behaviour = 1.25 - 1 - math.log(1.25)
    assert loss.terms["loss/policy"].item() == pytest.approx(1.25, rel=1e-5)
    assert loss.metrics["kl/behaviour"].item() == pytest.approx(behaviour, rel=1e-4)
    # k3 = 0.5 + log 2 - 1, times the ratio.
    assert loss.metrics["kl/reference"].item() == pytest.approx(
        1.25 * (math.log(2) - 0.5), rel=1e-5
    )
    assert loss.terms["loss/kl"].item() == pytest.approx(0.5 * k2 + 2.0 * behaviour, rel=1e-5)
    assert loss.total.item() == pytest.approx(1.25 + 0.5 * k2 + 2.0 * behaviour, rel=1e-5)


def test_grpo_loss_on_policy_is_minus_the_mean_advantage() -> None:
    log_probs = torch.log(torch.tensor([[0.3, 0.1], [0.5, 0.9], [0.2, 0.2]]))
    advantages = torch.tensor([[-1.0], [0.25], [0.9]])
    loss = grpo_loss(LossInputs(log_probs, log_probs.clone(), None, advantages), SURROGATE_ONLY)
    assert loss.terms["loss/policy"].item() == pytest.approx(-0.05, abs=1e-7)
    assert loss.total.item() == loss.terms["loss/policy"].item()


def test_grpo_loss_without_reference_measures_no_kl_to_it() -> None:
    loss = grpo_loss(LossInputs(log(0.5), log(0.4), None, torch.tensor([[1.0]])), SURROGATE_ONLY)
    assert math.isnan(loss.metrics["kl/reference"].item())
    assert loss.terms["loss/kl"].item() == 0.0


def test_grpo_loss_refuses_a_kl_weight_without_reference() -> None:
    settings = clipped_loss(
        clip_low=0.2, clip_high=0.2, kl_coef=0.1, kl_estimator="k3", kl_behaviour_coef=0.0
    )
    with pytest.raises(ValueError, match=r"kl_coef 0\.1 without reference_log_probs"):
        grpo_loss(LossInputs(log(0.5), log(0.5), None, torch.tensor([[1.0]])), settings)


def test_grpo_loss_pulls_towards_reference_and_sampling_policy() -> None:
    settings = clipped_loss(
        clip_low=0.2, clip_high=0.2, kl_coef=1.0, kl_estimator="k3", kl_behaviour_coef=1.0
    )
    # Below both other policies: a step against the gradient must raise the log-prob.
    log_probs = log(0.2).requires_grad_()
    loss = grpo_loss(LossInputs(log_probs, log(0.4), log(0.4), torch.tensor([[0.0]])), settings)
    # k3 to the reference: 1 - exp(d) = 1 - 2; k3 of the sampling policy: ratio - 1 = 0.5 - 1.
    assert gradient_of(loss.total, log_probs).item() == pytest.approx(-1.5, rel=1e-5)


def test_reference_penalty_is_the_weighted_sum_of_k1_over_each_sequence() -> None:
    # Rows: log 2 + log 4 = 3 log 2, and -2 log 2.
    sampled = torch.log(torch.tensor([[[0.5, 0.8], [0.1, 0.1]]]))
    reference = torch.log(torch.tensor([[[0.25, 0.2], [0.2, 0.2]]]))
    penalty = reference_penalty(sampled, reference, kl_coef=0.1)
    torch.testing.assert_close(penalty, torch.tensor([[0.3, -0.2]]) * math.log(2))


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_a_kl_in_the_reward_weighs_as_much_as_in_the_loss_whatever_the_length(
    num_tokens: int,
) -> None:
    """Exactly, over a coin thrown `num_tokens` times: all pairs of images by their heads.

    Where the two images of a group are compared with their mean, half of every reward is left.
    """
    logit = torch.tensor(0.7, requires_grad=True)
    policy = torch.stack([logit, torch.zeros(())]).log_softmax(0)
    reference = torch.tensor([0.35, 0.65]).log()
    heads = torch.arange(num_tokens + 1)
    tokens = (heads[:, None] <= torch.arange(num_tokens)).long()
    log_probs, references = policy[tokens], reference[tokens]
    chances = torch.distributions.Binomial(num_tokens, policy.detach().exp()[0]).log_prob(heads)
    pairs = torch.cartesian_prod(heads, heads)

    penalties = reference_penalty(log_probs.detach(), references, kl_coef=0.3)
    advantages = group_advantages(
        -penalties[pairs], normalization="mean_only", std_floor=0.0, clip=None
    )
    surrogate = clipped_surrogate(
        log_probs[pairs].flatten(0, 1),
        log_probs[pairs].flatten(0, 1).detach(),
        advantages.flatten()[:, None],
        clip_low=0.2,
        clip_high=0.2,
    )
    by_pair = surrogate.loss.mean(dim=1).view(-1, 2).mean(dim=1)
    in_reward = gradient_of(chances.exp()[pairs].prod(dim=1) * by_pair, logit)

    policy = torch.stack([logit, torch.zeros(())]).log_softmax(0)
    estimates = corrected_kl_estimate(policy[tokens], policy[tokens].detach(), references)
    in_loss = gradient_of(0.3 * chances.exp() * estimates.mean(dim=1), logit)

    assert in_loss.item() > 0.01
    assert (in_reward / in_loss).item() == pytest.approx(0.5, rel=1e-3)


def test_effective_sample_size_of_equal_weights_is_one() -> None:
    # Weights of 0.7.
    assert effective_sample_size(0.7, 0.49) == pytest.approx(1.0)


def test_effective_sample_size_counts_the_weights_that_matter() -> None:
    # (1 + 0 + 0 + 0)^2 / (4 * 1); (3 + 1)^2 / (2 * 10).
    assert effective_sample_size(1.0 / 4, 1.0 / 4) == 0.25
    assert effective_sample_size(4.0 / 2, 10.0 / 2) == pytest.approx(0.8)


@pytest.mark.parametrize("weight", [0.0, math.inf, math.nan])
def test_effective_sample_size_of_weights_that_say_nothing_is_nan(weight: float) -> None:
    assert math.isnan(effective_sample_size(weight, weight * weight))
