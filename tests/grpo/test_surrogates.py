"""Expected values are worked out by hand beside each test."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from glm_grpo.config.losses import (
    LOSSES,
    CispoLoss,
    ClippedLoss,
    GmpoLoss,
    SapoLoss,
    SurrogateLoss,
)
from glm_grpo.grpo.losses import LossInputs, grpo_loss
from glm_grpo.grpo.surrogates import (
    cispo_surrogate,
    clipped_surrogate,
    gmpo_surrogate,
    sapo_surrogate,
    sequence_surrogate,
)

NO_KL: dict[str, Any] = {
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "kl_placement": "loss",
    "kl_behaviour_coef": 0.0,
}


def clipped(**changes: Any) -> ClippedLoss:
    return ClippedLoss(**{"clip_low": 0.2, "clip_high": 0.2} | NO_KL | changes)


KINDS: dict[str, SurrogateLoss] = {
    "clipped": clipped(),
    "gspo": clipped(ratio_level="sequence", clip_low=0.02, clip_high=0.02),
    "capped": clipped(two_sided_clip=4.0),
    "cispo": CispoLoss(kind="cispo", **NO_KL),
    "sapo": SapoLoss(kind="sapo", **NO_KL),
    "gmpo": GmpoLoss(kind="gmpo", **NO_KL),
}


def ratios(*values: float) -> Tensor:
    return torch.tensor([[math.log(value) for value in values]], requires_grad=True)


def gradient_of(loss: Tensor, at: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, at)
    return gradient


def one(advantage: float) -> Tensor:
    return torch.tensor([[advantage]])


def test_two_sided_clip_limits_the_gradient_of_bad_images() -> None:
    log_probs = ratios(1.0, 3.0, 5.0)
    found = clipped_surrogate(
        log_probs, torch.zeros(1, 3), one(-2.0), clip_low=0.2, clip_high=0.2, two_sided_clip=4.0
    )
    # -min(min(r, 4) A, clip(r) A) with A = -2: 2 r up to the cap, 8 above it.
    torch.testing.assert_close(found.loss, torch.tensor([[2.0, 6.0, 8.0]]))
    torch.testing.assert_close(
        gradient_of(found.loss.sum(), log_probs), torch.tensor([[2.0, 6.0, 0.0]])
    )
    assert found.is_clipped is not None
    assert found.is_clipped.tolist() == [[False, False, True]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "bound"),
    [
        (1.5, 1.0, lambda ratio: {"clip_high": ratio - 1}),
        (0.75, -1.0, lambda ratio: {"clip_low": 1 - ratio}),
        (4.0, -1.0, lambda ratio: {"two_sided_clip": ratio}),
    ],
)
def test_a_ratio_at_its_bound_is_not_clipped(
    ratio: float, advantage: float, bound: Callable[[float], dict[str, float]]
) -> None:
    log_probs = ratios(ratio)
    # As rounded: the bound is this number to the bit.
    rounded = log_probs.detach().exp().item()
    bounds = {"clip_low": 0.1, "clip_high": 0.1, "two_sided_clip": 9.0} | bound(rounded)
    found = clipped_surrogate(log_probs, torch.zeros(1, 1), one(advantage), **bounds)
    assert found.is_clipped is not None
    assert found.is_clipped.tolist() == [[False]]


def test_the_cap_does_not_matter_to_good_images() -> None:
    args = (ratios(0.5, 1.1, 5.0), torch.zeros(1, 3), one(1.5))
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    with_cap = clipped_surrogate(*args, **bounds, two_sided_clip=2.0)
    assert with_cap.loss.equal(clipped_surrogate(*args, **bounds).loss)


def test_sequence_ratio_is_the_geometric_mean() -> None:
    log_probs = ratios(2.0, 0.5, 1.0, math.e)
    found = sequence_surrogate(log_probs, torch.zeros(1, 4), one(2.0), clip_low=0.5, clip_high=0.5)
    # log s = 1 / 4; each token's gradient is that of -A s: -2 s / 4, over 4 equal losses.
    s = math.exp(0.25)
    torch.testing.assert_close(found.loss, torch.full((1, 4), -2 * s))
    expected = torch.full((1, 4), -2 * s / 4)
    torch.testing.assert_close(gradient_of(found.loss.mean(), log_probs), expected)


def test_sequence_ratio_clips_the_whole_image() -> None:
    log_probs = ratios(1.5, 1.0)
    found = sequence_surrogate(log_probs, torch.zeros(1, 2), one(1.0), clip_low=0.1, clip_high=0.1)
    # s = sqrt(1.5) = 1.22 is above 1.1.
    torch.testing.assert_close(found.loss, torch.full((1, 2), -1.1))
    assert gradient_of(found.loss.mean(), log_probs).count_nonzero() == 0
    assert found.is_clipped is not None
    assert found.is_clipped.all()


def test_gradient_of_the_sequence_ratio_by_finite_differences() -> None:
    start = 0.02 * torch.randn(
        3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    weights = torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def mean_loss(log_probs: Tensor) -> Tensor:
        log_ratio = (log_probs * weights).mean(dim=1)
        ratio = log_ratio.exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.98, 1.02) * advantages).mean()

    log_probs = start.float().requires_grad_()
    found = sequence_surrogate(
        log_probs,
        torch.zeros(3, 5),
        advantages.float()[:, None],
        clip_low=0.02,
        clip_high=0.02,
        token_weights=weights.float(),
    )
    gradient = gradient_of(found.loss.mean(), log_probs)
    for row in range(3):
        for column in range(5):
            shift = torch.zeros_like(start)
            shift[row, column] = 1e-5
            slope = (mean_loss(start + shift) - mean_loss(start - shift)).item() / 2e-5
            assert gradient[row, column].item() == pytest.approx(slope, abs=1e-6)


def test_sequence_ratio_weighs_each_token_by_its_own_advantage() -> None:
    log_probs = ratios(2.0, 0.5, 1.0, math.e)
    advantages = torch.tensor([[2.0, -1.0, 0.0, 3.0]])
    found = sequence_surrogate(
        log_probs, torch.zeros(1, 4), advantages, clip_low=0.5, clip_high=0.5
    )
    # The ratio of the sequence, s, for all tokens; the gradient of each token is its own.
    s = math.exp(0.25)
    torch.testing.assert_close(found.loss, -s * advantages)
    torch.testing.assert_close(gradient_of(found.loss.sum(), log_probs), -s * advantages)


def test_equal_advantages_of_tokens_give_the_gradient_of_the_sequence() -> None:
    weights = torch.tensor([[0.0, 2.0, 1.0, 1.0]])
    bounds = {"clip_low": 0.5, "clip_high": 0.5, "token_weights": weights}
    gradients = []
    for columns in (1, 4):
        log_probs = ratios(1.2, 0.9, 1.1, 0.8)
        advantages = torch.full((1, columns), 2.0)
        found = sequence_surrogate(log_probs, torch.zeros(1, 4), advantages, **bounds)
        gradients.append(gradient_of(found.loss.mean(), log_probs))
    torch.testing.assert_close(*gradients)


def test_cispo_weighs_by_the_capped_ratio() -> None:
    log_probs = ratios(0.5, 2.0, 9.0)
    found = cispo_surrogate(log_probs, torch.zeros(1, 3), one(3.0), max_ratio=5.0)
    # The gradient of -min(r, 5) A log_prob, the weight held still.
    torch.testing.assert_close(
        gradient_of(found.loss.sum(), log_probs), torch.tensor([[-1.5, -6.0, -15.0]])
    )
    assert found.is_clipped is not None
    assert found.is_clipped.tolist() == [[False, False, True]]


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.5), (-2.0, 3.0)])
def test_sapo_is_a_sigmoid_around_1(advantage: float, tau: float) -> None:
    log_probs = ratios(1.0, 1.5)
    found = sapo_surrogate(
        log_probs, torch.zeros(1, 2), one(advantage), tau_positive=1.5, tau_negative=3.0
    )
    gate = [1 / (1 + math.exp(-tau * (r - 1))) for r in (1.0, 1.5)]
    expected = torch.tensor([[-advantage * each * 4 / tau for each in gate]])
    torch.testing.assert_close(found.loss, expected)
    # d / d log r: -A 4 sigmoid (1 - sigmoid) r, which is -A at r = 1.
    slopes = [-advantage * 4 * g * (1 - g) * r for g, r in zip(gate, (1.0, 1.5), strict=True)]
    torch.testing.assert_close(gradient_of(found.loss.sum(), log_probs), torch.tensor([slopes]))
    assert found.is_clipped is None


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gmpo_bounds_log_ratios_the_way_the_advantage_goes(advantage: float) -> None:
    log_probs = torch.tensor([[0.1, 0.9, -0.9]], requires_grad=True)
    found = gmpo_surrogate(log_probs, torch.zeros(1, 3), one(advantage), log_clip=0.4)
    # A > 0: min(log r, clip) = 0.1, 0.4, -0.9. A < 0: max(log r, clip) = 0.1, 0.9, -0.4.
    bounded = [0.1, 0.4, -0.9] if advantage > 0 else [0.1, 0.9, -0.4]
    s = math.exp(sum(bounded) / 3)
    torch.testing.assert_close(found.loss, torch.full((1, 3), -advantage * s))
    free = [1.0, 0.0, 1.0] if advantage > 0 else [1.0, 1.0, 0.0]
    expected = torch.tensor([[-advantage * s / 3 * each for each in free]])
    torch.testing.assert_close(gradient_of(found.loss.mean(), log_probs), expected)
    assert found.is_clipped is not None
    assert found.is_clipped.tolist() == [[each == 0.0 for each in free]]


def inputs(log_probs: Tensor, **changes: Any) -> LossInputs:
    values: dict[str, Any] = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach(),
        "reference_log_probs": None,
        "advantages": torch.tensor([[1.5], [-0.5], [0.0], [-1.0]]),
    }
    return LossInputs(**values | changes)


def made(seed: int, *, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_have_one_gradient_on_policy(kind: str) -> None:
    log_probs = (-made(0).abs()).requires_grad_()
    found = gradient_of(grpo_loss(inputs(log_probs), KINDS[kind]).total, log_probs)
    expected = -inputs(log_probs).advantages.expand(4, 6) / 24
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("kind", ["gspo", "cispo", "sapo", "gmpo"])
def test_kinds_differ_once_the_policy_has_moved(kind: str) -> None:
    log_probs = (-made(0).abs()).requires_grad_()
    moved = inputs(log_probs, old_log_probs=log_probs.detach() + made(1, scale=0.4))
    one_kind, other = (
        gradient_of(grpo_loss(moved, KINDS[name]).total, log_probs) for name in (kind, "clipped")
    )
    assert (one_kind - other).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_top_entropy_tokens_alone_are_learned(kind: str) -> None:
    log_probs = (-made(0).abs()).requires_grad_()
    entropy = made(3).abs()
    loss = KINDS[kind].model_copy(update={"top_entropy_quantile": 0.5})
    gradient = gradient_of(grpo_loss(inputs(log_probs, entropy=entropy), loss).total, log_probs)
    lowest = entropy.argsort(dim=1)[:, :3]
    is_learned = torch.ones(4, 6).scatter(1, lowest, 0.0)
    expected = -inputs(log_probs).advantages * is_learned / 24
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_importance_weights_weigh_every_kind(kind: str) -> None:
    log_probs = (-made(0).abs()).requires_grad_()
    # Of single tokens, also where a ratio of the row is clipped; some are masked.
    weights = torch.tensor([0.5, 2.0, 1.0, 0.0])[:, None] * torch.tensor([1, 0, 1, 2, 1, 1])
    gradient = gradient_of(
        grpo_loss(inputs(log_probs, importance_weights=weights), KINDS[kind]).total, log_probs
    )
    expected = -inputs(log_probs).advantages * weights / 24
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=0)


def test_entropy_is_raised() -> None:
    log_probs = (-made(0).abs()).requires_grad_()
    entropy = made(3).abs().requires_grad_()
    loss = grpo_loss(inputs(log_probs, entropy=entropy), clipped(entropy_coef=0.3))
    torch.testing.assert_close(gradient_of(loss.total, entropy), torch.full((4, 6), -0.3 / 24))
    torch.testing.assert_close(loss.terms["loss/entropy"], -0.3 * entropy.detach().mean())
    assert not loss.terms["loss/entropy"].requires_grad


def test_sequence_std_is_that_of_mean_log_ratios() -> None:
    log_probs = (-made(0).abs()).requires_grad_()
    difference = made(1, scale=0.1)
    moved = inputs(log_probs, old_log_probs=log_probs.detach() - difference)
    metrics = grpo_loss(moved, clipped()).metrics
    mean, square = metrics["ratio/sequence_log"].mean(), metrics["ratio/sequence_log_square"].mean()
    expected = difference.double().mean(dim=1).std(correction=0).item()
    assert math.sqrt(square - mean**2) == pytest.approx(expected, rel=1e-5)


def test_sequence_log_ratio_is_the_one_that_is_clipped() -> None:
    # Of four tokens only the half of highest entropy counts: (0.3 + 0.1) / 4 = 0.1.
    log_probs = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], requires_grad=True)
    moved = LossInputs(
        log_probs,
        log_probs.detach() - torch.tensor([[0.3, 0.5, 0.1, 0.7]]),
        None,
        torch.tensor([[1.0]]),
        entropy=torch.tensor([[3.0, 1.0, 2.0, 0.5]]),
    )
    settings = clipped(ratio_level="sequence", top_entropy_quantile=0.5, clip_high=0.11)
    metrics = grpo_loss(moved, settings).metrics
    torch.testing.assert_close(metrics["ratio/sequence_log"], torch.tensor([0.1]).double())
    # exp(0.1) = 1.105 is inside the clip, exp(0.4), the mean over all tokens, is not.
    assert not metrics["ratio/clip_fraction"].any()


def test_a_two_sided_clip_inside_the_clip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"above 1 \+ clip_high = 1\.2"):
        clipped(two_sided_clip=1.1)


def test_every_kind_is_tested_here() -> None:
    assert {each.kind for each in KINDS.values()} == {*LOSSES} - {"custom"}
