"""Expected values are worked out by hand beside each test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.grpo.credit import TokenPlaces, place_credit, token_advantages, token_places
from rewards.group_statistics import centre
from rewards.score_map import Grid

TWO_BY_TWO = Grid(2, 2)
GRPO: dict[str, Any] = {"normalization": "group_std", "std_floor": 0.02, "clip": 5.0}
CENTRED: dict[str, Any] = {"normalization": "mean_only", "std_floor": 0.0, "clip": None}


def credit(
    placed: Tensor, places: TokenPlaces, rewards: Tensor | None = None, **options: Any
) -> Tensor:
    """Token advantages of parts, compared by place; without rewards, everything has a place."""
    if rewards is None:
        rewards = placed.double().sum(dim=(2, 3)).float()
    options = {"reward_to_go": 0.2} | CENTRED | options
    return token_advantages(rewards, centre(placed.double()), places, **options)


def random_parts(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def mean_square(values: Tensor) -> float:
    return values.double().square().mean().item()


def test_a_token_of_the_same_grid_draws_one_place_and_leaves_the_rest_to_go() -> None:
    places = token_places((TWO_BY_TWO,), TWO_BY_TWO)
    assert places.own.equal(torch.eye(4))
    assert places.to_go.equal(torch.ones(4, 4).triu())


def test_a_token_of_a_coarser_grid_draws_all_places_that_it_shows() -> None:
    places = token_places((Grid(1, 2), TWO_BY_TWO), TWO_BY_TWO)
    # Left and right half; places 0 and 2 are the left ones.
    assert places.own[:2].tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    assert places.to_go[:2].tolist() == [[1, 1, 1, 1], [0, 1, 0, 1]]
    assert places.own[2:].equal(torch.eye(4))


def test_tokens_of_a_finer_grid_share_a_place() -> None:
    places = token_places((Grid(2, 4),), Grid(1, 2))
    left, right = [1.0, 0.0], [0.0, 1.0]
    assert places.own.tolist() == [left, left, right, right] * 2
    # Until the last token of the left place is drawn, all of what it earns may depend on others.
    assert places.to_go.tolist() == [*[[1.0, 1.0]] * 6, *[right] * 2]


def test_grids_that_do_not_fit_draw_by_area() -> None:
    places = token_places((Grid(1, 2),), Grid(1, 3))
    # Each token covers one place and half of the middle one.
    assert places.own.tolist() == [[1, 0.5, 0], [0, 0.5, 1]]
    assert places.to_go.tolist() == [[1, 1, 1], [0, 1, 1]]


def test_edits_have_no_preview() -> None:
    assert token_places((Grid(0, 0), TWO_BY_TWO), TWO_BY_TWO).own.equal(torch.eye(4))


def test_own_place_and_reward_to_go_by_hand() -> None:
    # One prompt, two images, one term: they differ by 4 at the first place, by -2 at the last.
    placed = torch.tensor([[[[4.0, 1.0, 3.0, 0.0]], [[0.0, 1.0, 3.0, 2.0]]]])
    places = token_places((TWO_BY_TWO,), TWO_BY_TWO)
    own = torch.tensor([2.0, 0.0, 0.0, -1.0])
    to_go = torch.tensor([1.0, -1.0, -1.0, -1.0])
    # As credit of images: 1 and -1, a root mean square of 1, to which tokens are scaled.
    scaled_own, scaled_to_go = own / (5 / 4) ** 0.5, to_go
    for weight, expected in ((0.0, scaled_own), (1.0, scaled_to_go)):
        found = credit(placed, places, reward_to_go=weight)
        torch.testing.assert_close(found, torch.stack([expected, -expected])[None])
    mixed = 0.75 * scaled_own + 0.25 * scaled_to_go
    expected = mixed / mixed.square().mean().sqrt()
    found = credit(placed, places, reward_to_go=0.25)
    torch.testing.assert_close(found, torch.stack([expected, -expected])[None])


@pytest.mark.parametrize("normalization", ["group_std", "mean_only", "batch_std"])
@pytest.mark.parametrize("reward_to_go", [0.0, 0.2, 1.0])
def test_one_place_is_credit_by_image_to_the_bit(normalization: str, reward_to_go: float) -> None:
    placed = random_parts(5, 8, 3, 1)
    rewards = placed.sum(dim=(2, 3)) + 0.1 * random_parts(6, 8)[:5]
    options: dict[str, Any] = GRPO | {"normalization": normalization}
    places = token_places((Grid(3, 4), Grid(1, 1)), Grid(1, 1))
    found = credit(placed, places, rewards, reward_to_go=reward_to_go, **options)
    images = group_advantages(rewards, **options)
    assert found.equal(images[..., None].expand(5, 8, 13))


def test_without_parts_every_token_has_the_advantage_of_its_image() -> None:
    rewards = random_parts(3, 4)
    places = token_places((TWO_BY_TWO,), TWO_BY_TWO)
    found = credit(torch.zeros(3, 4, 2, 4), places, rewards, **GRPO)
    assert found.equal(group_advantages(rewards, **GRPO)[..., None].expand(3, 4, 4))


def test_groups_sum_to_zero_at_every_token_within_the_bound() -> None:
    placed = random_parts(4, 6, 2, 16).exp()
    places = token_places((Grid(16, 16), Grid(4, 4)), Grid(4, 4))
    found = credit(placed, places, **GRPO | {"clip": 1.5})
    assert found.sum(dim=1).abs().max() < 1e-5
    assert found.abs().max() == pytest.approx(1.5)


def test_tokens_have_the_root_mean_square_of_images() -> None:
    placed = random_parts(4, 6, 2, 16)
    places = token_places((Grid(4, 4),), Grid(4, 4))
    rewards = placed.sum(dim=(2, 3))
    images = group_advantages(rewards, **GRPO | {"clip": None})
    found = credit(placed, places, **GRPO | {"clip": None})
    assert mean_square(found) == pytest.approx(mean_square(images), rel=1e-5)


def test_a_group_of_nearly_equal_totals_does_not_outweigh_the_others() -> None:
    # Differences at the places are alike; the totals differ by 0.01 and by 0.4.
    placed = torch.tensor([[[[0.41, 0.0]], [[0.0, 0.4]]], [[[0.4, 0.0]], [[0.0, 0.0]]]])
    found = credit(placed, token_places((Grid(1, 2),), Grid(1, 2)), **GRPO, reward_to_go=0.0)
    # 0.005 / 0.02, because the std is below the floor, and 0.2 / (0.4 / sqrt(2)).
    assert found.square().mean(dim=(1, 2)).sqrt().tolist() == pytest.approx([0.25, 0.5**0.5])


def test_a_standardised_term_keeps_its_weight_in_every_group() -> None:
    # Images differ by 1 in both terms and groups; at the places of the first group's first term,
    # by 100.
    first = torch.tensor([[[50.5, -50.0], [-50.5, 50.0]], [[0.5, 0.0], [-0.5, 0.0]]])
    second = torch.tensor([[0.25, 0.25], [-0.25, -0.25]]).expand(2, 2, 2)
    placed, grid = torch.stack([first, second], dim=2), Grid(1, 2)
    found = credit(placed, token_places((grid,), grid), reward_to_go=0.0, is_standardised=True)
    # In the second group, (0.5, 0) becomes (sqrt(1/2), 0), and (0.25, 0.25) becomes (0.5, 0.5).
    assert (found[1, 0, 0] / found[1, 0, 1]).item() == pytest.approx(1 + 2**0.5)


def test_a_term_with_few_large_parts_keeps_its_weight() -> None:
    # The first term is spread evenly over places, the second has all in one; of images, both have
    # the same credit, so a token's credit is on average as large by either.
    spread = random_parts(40, 8, 1).expand(40, 8, 16) / 16
    letters = torch.zeros(40, 8, 16)
    letters[..., 5] = random_parts(80, 8)[40:]
    places = token_places((Grid(4, 4),), Grid(4, 4))
    one, other = (credit(each[:, :, None], places, reward_to_go=0.0) for each in (spread, letters))
    both = credit(torch.stack([spread, letters], dim=2), places, reward_to_go=0.0)
    factor = (both / (one + other)).flatten()
    # With one scale for both, the second would count four times as much.
    torch.testing.assert_close(factor, factor[:1].expand_as(factor), rtol=1e-3, atol=1e-3)


def test_flat_groups_learn_nothing_even_if_their_places_differ() -> None:
    placed = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]], [[[1.0, 0.0]], [[0.0, 0.5]]]])
    found = credit(placed, token_places((Grid(1, 2),), Grid(1, 2)))
    assert found[0].count_nonzero() == 0
    assert found[1].count_nonzero() > 0


def test_places_are_what_each_contributed_less_the_mean_of_the_group() -> None:
    # Two terms at four places; the second group is flat.
    first = torch.tensor([[[4.0, 1.0, 3.0, 0.0], [1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 3.0, 2.0]] * 2])
    placed = torch.stack([first, first[:1].expand(2, 2, 4)])
    found = place_credit(placed.sum(dim=(2, 3)), centre(placed.double()), TWO_BY_TWO)
    # (5, 1, 3, 0) and (0, 2, 6, 4), less (2.5, 1.5, 4.5, 2).
    half = torch.tensor([[2.5, -0.5], [-1.5, -2.0]])
    assert found.equal(torch.stack([half, -half, 0 * half, 0 * half]).reshape(2, 2, 2, 2))


def test_a_penalty_is_credit_of_the_whole_image() -> None:
    placed = torch.zeros(1, 2, 1, 4)
    rewards = torch.tensor([[-0.5, 0.5]])
    found = credit(placed, token_places((TWO_BY_TWO,), TWO_BY_TWO), rewards)
    assert found.tolist() == [[[-0.5] * 4, [0.5] * 4]]


def test_flipping_the_rewards_flips_every_token() -> None:
    placed = random_parts(4, 6, 2, 16)
    places = token_places((Grid(16, 16), Grid(4, 4)), Grid(4, 4))
    assert credit(-placed, places, **GRPO).equal(-credit(placed, places, **GRPO))


def test_a_policy_with_independent_places_has_a_cleaner_gradient_by_place() -> None:
    # All 64 pairs of images of 3 tokens, each 0 or 1 with probability 1/2; a place earns its token.
    tokens = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 6).view(64, 2, 3)
    places = token_places((Grid(1, 3),), Grid(1, 3))
    by_place = credit(tokens[:, :, None], places, reward_to_go=0.0)
    by_image = group_advantages(tokens.sum(dim=2), **CENTRED)[..., None]
    # The gradient of log-probs with respect to logits is token - 1/2. With d the pair's difference
    # at a token and D that of the sums, it is as D d by image, with mean 1/2 and variance 3/4. By
    # place it is as d^2 where the pair is not flat (D is not 0), which is 1 with probability 3/8:
    # variance 3/8 - 9/64.
    for advantages, ratio in ((by_image, 1 / 3), (by_place, (9 / 64) / (15 / 64))):
        gradients = (advantages * (tokens - 0.5)).mean(dim=1)
        mean = gradients.mean(dim=0)
        noise = (gradients - mean).square().sum(dim=1).mean()
        assert (mean.square().sum() / noise).item() == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("tokens", "grid"),
    [(Grid(2, 2), Grid(1, 2)), (Grid(1, 4), Grid(1, 3)), (Grid(2, 2), Grid(2, 2))],
)
def test_reward_to_go_has_the_direction_of_the_exact_gradient(tokens: Grid, grid: Grid) -> None:
    # All 16 images of four tokens, each 0 or 1, whose logits depend on all tokens before.
    images = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4)
    before = (images * 2 ** torch.arange(4.0)).cumsum(dim=1).roll(1, dims=1)
    before[:, 0] = 0
    logits = random_parts(4, 8).requires_grad_()
    chosen = logits[torch.arange(4), before.long()] * (2 * images - 1)
    log_probs = torch.nn.functional.logsigmoid(chosen)
    # What a place earns depends on its tokens in any way, and on no others.
    places = token_places((tokens,), grid)
    earned = (images * 3 ** torch.arange(4.0) @ (places.own > 0).float()).cos()
    exact = (log_probs.sum(dim=1).exp() * earned.sum(dim=1)).sum()
    # All pairs of images as groups of two, each as often as it is drawn.
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    advantages = credit(earned[pairs][:, :, None], places, reward_to_go=1.0)
    frequency = log_probs.detach().sum(dim=1).exp()[pairs].prod(dim=1)
    learned = (frequency[:, None, None] * advantages * log_probs[pairs]).sum()
    gradients = [
        torch.autograd.grad(value, logits, retain_graph=True)[0].flatten()
        for value in (exact, learned)
    ]
    assert torch.cosine_similarity(*gradients, dim=0).item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("normalization", ["group_std", "mean_only", "batch_std"])
@pytest.mark.parametrize("is_standardised", [False, True])
def test_tokens_of_an_image_left_out_have_no_credit_and_those_of_others_that_of_a_smaller_group(
    normalization: Any, is_standardised: bool
) -> None:
    placed, places = random_parts(3, 4, 2, 4), token_places((TWO_BY_TWO,), TWO_BY_TWO)
    options = GRPO | {"normalization": normalization, "is_standardised": is_standardised}
    smaller = placed[:, [0, 1, 3]]
    placed[:, 2] = torch.nan
    rewards = placed.sum(dim=(2, 3))
    found = credit(placed, places, rewards, **options)
    assert found[:, 2].count_nonzero() == 0
    compared = centre(placed.double())
    assert place_credit(rewards, compared, TWO_BY_TWO)[:, 2].count_nonzero() == 0
    expected = credit(smaller, places, **options)
    torch.testing.assert_close(found[:, [0, 1, 3]], expected, rtol=1e-5, atol=1e-6)
