from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rewards.group_statistics import centre
from rewards.score_map import Grid
from rewards.types import RewardError, RewardTable
from rewards.weighting import (
    Mode,
    advantage_shares,
    combine,
    contributions,
    is_zero_std,
    placed_contributions,
    placed_share,
)


def make_table(
    raw: list[list[list[float]]],
    weights: list[float],
    mask: list[list[bool]] | None = None,
    floors: list[float] | None = None,
) -> RewardTable:
    """Raw scores by prompt, image and term."""
    scores = torch.tensor(raw)
    applicable = torch.ones(len(raw), len(weights), dtype=torch.bool)
    return RewardTable(
        names=tuple(f"term_{index}" for index in range(len(weights))),
        raw=scores,
        is_applicable=applicable if mask is None else torch.tensor(mask),
        weights=torch.tensor(weights),
        std_floors=torch.tensor([1e-4] * len(weights) if floors is None else floors),
    )


def assert_equal(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_combine_without_mask_is_exactly_the_weighted_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    raw = torch.rand(5, 8, 4, generator=generator)
    table = make_table(raw.tolist(), [0.4, 0.2, 0.3, 0.1])
    assert torch.equal(combine(table, mode="weighted_sum"), (raw * table.weights).sum(-1))


@pytest.mark.parametrize("mode", ["weighted_sum", "normalize_then_sum"])
def test_combine_gives_a_prompt_the_same_total_whatever_prompts_stand_beside_it(mode: Mode) -> None:
    # Five sizes whose sum depends on the order in which they are added.
    raw = torch.rand(9, 4, 5, generator=torch.Generator().manual_seed(0))
    mask = [[True] * 5] * 8 + [[True, True, False, True, True]]
    table = make_table(raw.tolist(), [0.4, 0.2, 0.3, 0.1, 0.3], mask)
    whole = combine(table, mode=mode)
    if mode == "weighted_sum":
        assert whole[:8].equal((raw * table.weights).sum(-1)[:8])
    for rows in (slice(0, 1), slice(0, 3), slice(3, 7), slice(4, 9), slice(8, 9)):
        part = replace(table, raw=table.raw[rows], is_applicable=table.is_applicable[rows])
        assert combine(part, mode=mode).equal(whole[rows])


def test_combine_gives_the_weight_of_masked_terms_to_the_others() -> None:
    # Prompt 0: 0.5 * 0.8 + 0.5 * 0.2 = 0.5. Prompt 1 has the second term alone, of weight 0.5
    # out of 1: 0.2 * 0.5 * (1 / 0.5) = 0.2; its first score is not read.
    table = make_table([[[0.8, 0.2]], [[0.8, 0.2]]], [0.5, 0.5], [[True, True], [False, True]])
    assert_equal(combine(table, mode="weighted_sum"), [[0.5], [0.2]])


def test_combine_keeps_the_scale_under_negative_weights() -> None:
    # |0.5| + |-0.25| = 0.75 in all; 0.25 applies to prompt 1: -0.25 * 0.4 * 3 = -0.3.
    table = make_table([[[1.0, 0.4]], [[1.0, 0.4]]], [0.5, -0.25], [[True, True], [False, True]])
    assert_equal(combine(table, mode="weighted_sum"), [[0.4], [-0.3]])


def test_combine_normalised_standardises_each_term_in_its_group() -> None:
    # Scores 0, 1, 2: mean 1, sample std 1 -> -1, 0, 1. Scores 0, 30, 0: mean 10, sample std
    # sqrt((100 + 400 + 100) / 2) = 17.32 -> -0.577, 1.155, -0.577. Weights 1 and 2.
    table = make_table([[[0.0, 0.0], [1.0, 30.0], [2.0, 0.0]]], [1.0, 2.0])
    low, high = -10 / math.sqrt(300), 20 / math.sqrt(300)
    expected = [[-1 + 2 * low, 2 * high, 1 + 2 * low]]
    assert_equal(combine(table, mode="normalize_then_sum"), expected)


def test_combine_normalised_is_exactly_zero_in_zero_std_groups() -> None:
    # One rounding apart: no difference between images, so none between totals.
    neighbour = torch.nextafter(torch.tensor(0.3), torch.tensor(1.0)).item()
    table = make_table([[[0.3], [neighbour], [0.3]]], [1.0])
    assert combine(table, mode="normalize_then_sum").tolist() == [[0.0, 0.0, 0.0]]


def test_scores_are_zero_std_up_to_eight_roundings_apart() -> None:
    # Float32 has steps of 2^-23 from 1 to 2. The spread may be 8 of them, times the largest score.
    step = 2.0**-23
    first = [1.0, 1.0, -1.0, 0.0]
    second = [1.0 + 8 * step, 1.0 + 9 * step, -1.0 - 8 * step, 0.0]
    assert is_zero_std(torch.tensor([[first, second]])).tolist() == [[True, False, True, True]]


def test_combine_normalised_has_a_floor_for_every_term() -> None:
    # All three spread by 0.25: above the floor of the first, at that of the second, and an eighth
    # of that of the third.
    table = make_table(
        [[[0.25] * 3, [0.5] * 3, [0.75] * 3]], [1.0, 1.0, 1.0], floors=[0.125, 0.25, 2.0]
    )
    parts = contributions(table, mode="normalize_then_sum")
    assert_equal(parts[0], [[-1.0, -1.0, -0.125], [0.0, 0.0, 0.0], [1.0, 1.0, 0.125]])


def test_combine_normalised_does_not_let_masked_prompts_count() -> None:
    # Prompt 1 has the first term alone, whatever stands in the second column, and prompt 0 has
    # what it would have by itself.
    both = [[0.0, 5.0], [1.0, 6.0], [2.0, 7.0]]
    alone = combine(make_table([both], [1.0, 3.0]), mode="normalize_then_sum")
    for filler in (0.0, 1e6, float("nan"), float("inf")):
        masked = [[3.0, filler], [1.0, -filler], [2.0, filler]]
        table = make_table([both, masked], [1.0, 3.0], [[True, True], [True, False]])
        totals = combine(table, mode="normalize_then_sum")
        assert torch.equal(totals[0], alone[0])
        # (1 + 3) / 1 * 1 * (1, -1, 0).
        assert_equal(totals[1], [4.0, -4.0, 0.0])
        assert_equal(advantage_shares(table, mode="normalize_then_sum"), [(0.25 + 1) / 2, 0.75 / 2])


def test_combine_by_the_base_model_divides_by_its_mean_and_std() -> None:
    # Base model, over all four images: 0, 1, 2, 3 have mean 1.5 and sample std
    # sqrt((2.25 + 0.25 + 0.25 + 2.25) / 3) = sqrt(5 / 3); the second term has mean 5 and no
    # spread, so its floor of 0.5 divides. Weights 1 and -2.
    base = make_table([[[0.0, 5.0], [1.0, 5.0]], [[2.0, 5.0], [3.0, 5.0]]], [1.0, -2.0])
    later = make_table([[[3.0, 5.0]], [[1.5, 6.0]]], [1.0, -2.0], floors=[1e-4, 0.5])
    totals = combine(later, mode="normalize_then_sum", base_scores=base)
    assert_equal(totals, [[1.5 / math.sqrt(5 / 3)], [-2 * (6 - 5) / 0.5]])


def test_combine_by_the_base_model_leaves_masked_prompts_out_of_its_mean() -> None:
    # The first term applies to prompt 0 alone, with 1 and 3: mean 2, so that 2 gives 0.
    nan = float("nan")
    mask = [[True, True], [False, True]]
    base = make_table([[[1.0, 0.0], [3.0, 2.0]], [[nan, 0.0], [nan, 2.0]]], [3.0, 1.0], mask)
    later = make_table([[[2.0, 2.0]], [[nan, 3.0]]], [3.0, 1.0], mask)
    totals = combine(later, mode="normalize_then_sum", base_scores=base)
    # 0, 2, 0, 2: mean 1, std sqrt(4 / 3). Prompt 0: 3 * 0 + 1 * 1 / std; prompt 1 by (3 + 1) / 1.
    std = math.sqrt(4 / 3)
    assert_equal(totals, [[1 / std], [4 * 2 / std]])


def test_combine_by_the_base_model_refuses_a_term_without_a_scale() -> None:
    base = make_table([[[0.0, 1.0]]], [1.0, 1.0], [[False, True]])
    later = make_table([[[0.5, 1.0]]], [1.0, 1.0])
    with pytest.raises(RewardError, match="term_0 applies"):
        combine(later, mode="normalize_then_sum", base_scores=base)
    # A term that is only shown needs none.
    shown = make_table([[[0.5, 1.0]]], [0.0, 1.0])
    assert_equal(combine(shown, mode="normalize_then_sum", base_scores=base), [[0.0]])


def test_combine_refuses_prompts_without_a_weighed_term() -> None:
    table = make_table([[[0.1, 0.2]], [[0.1, 0.2]]], [1.0, 0.0], [[True, True], [False, True]])
    with pytest.raises(ValueError, match="prompt row 1 has no total"):
        combine(table, mode="weighted_sum")


def test_combine_normalised_refuses_single_images() -> None:
    with pytest.raises(ValueError, match="group size 1"):
        combine(make_table([[[0.1]]], [1.0]), mode="normalize_then_sum")


@pytest.mark.parametrize("mode", ["weighted_sum", "normalize_then_sum"])
def test_contributions_add_up_to_the_total(mode: str) -> None:
    raw = [[[0.0, 0.5], [1.0, 0.1]], [[0.2, 0.9], [0.3, 0.3]]]
    table = make_table(raw, [0.7, 0.3], [[True, True], [True, False]])
    parts = contributions(table, mode=mode)  # type: ignore[arg-type]
    assert_equal(parts.sum(-1), combine(table, mode=mode).tolist())  # type: ignore[arg-type]
    assert parts[1, :, 1].tolist() == [0.0, 0.0]


def test_shares_of_independent_terms_are_their_variances() -> None:
    # Contributions +-1 and +-2, uncorrelated: variances 1 and 4 of 5.
    raw = [[[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]]
    assert_equal(advantage_shares(make_table(raw, [1.0, 2.0]), mode="weighted_sum"), [0.2, 0.8])


def test_shares_are_negative_where_a_term_pulls_against_the_total() -> None:
    # Contributions (0, 3) and (1, 0): total (1, 3), centred (-1, 1). Centred contributions
    # (-1.5, 1.5) and (0.5, -0.5): covariances 1.5 and -0.5, variance 1.
    raw = [[[0.0, 1.0], [3.0, 0.0]]]
    assert_equal(advantage_shares(make_table(raw, [1.0, 1.0]), mode="weighted_sum"), [1.5, -0.5])


def test_shares_are_averaged_over_groups_that_vary() -> None:
    # Group 0 varies by the first term alone, group 1 by the second, group 2 not at all.
    raw = [[[0.0, 0.5], [1.0, 0.5]], [[0.5, 0.0], [0.5, 0.1]], [[0.5, 0.5], [0.5, 0.5]]]
    assert_equal(advantage_shares(make_table(raw, [1.0, 1.0]), mode="weighted_sum"), [0.5, 0.5])


def test_shares_are_zero_where_every_group_is_zero_std() -> None:
    table = make_table([[[0.5, 0.1], [0.5, 0.1]]], [1.0, 1.0])
    assert advantage_shares(table, mode="weighted_sum").tolist() == [0.0, 0.0]


def test_combine_refuses_a_total_that_float32_cannot_hold() -> None:
    table = make_table([[[3e38, 1.0], [0.0, 1.0]]], [2.0, 1.0])
    with pytest.raises(RewardError, match=r"row 0, image 0 is inf.*term_0 3e\+38"):
        combine(table, mode="weighted_sum")


@pytest.mark.parametrize("mode", ["weighted_sum", "normalize_then_sum"])
def test_placed_contributions_add_up_to_those_of_the_terms(mode: Mode) -> None:
    parts = torch.randn(3, 4, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    raw = torch.cat([parts.sum(dim=(3, 4)), torch.rand(3, 4, 1)], dim=2)
    # The second term does not apply to the last prompt, whose weight goes to the others; the third
    # has no parts.
    mask = [[True, True, True], [True, True, True], [True, False, True]]
    table = replace(
        make_table(raw.tolist(), [0.5, -0.2, 0.3], mask),
        score_map={f"term_{index}": parts[:, :, index] for index in range(2)},
    )
    placed = placed_contributions(table, Grid(2, 3), mode=mode)
    assert placed.shape == (3, 4, 3, 6)
    expected = centre(contributions(table, mode=mode)[:, :, :2].double())
    torch.testing.assert_close(placed.sum(dim=-1)[:, :, :2], expected, rtol=1e-6, atol=1e-6)
    assert placed.sum(dim=1).abs().max() < 1e-12
    assert placed[:, :, 2].count_nonzero() == 0
    assert placed[2, :, 1].count_nonzero() == 0


def test_boxes_of_a_kind_are_not_compared_with_their_places() -> None:
    # Maps differ by place; what boxes earned in comparison with their kind stays as it is.
    parts = torch.tensor([[[[0.5, 0.0]], [[0.1, 0.0]]]])
    compared = torch.tensor([[[[0.0, 0.2]], [[-0.2, 0.0]]]])
    table = replace(
        make_table([[[0.9], [0.1]]], [2.0]),
        score_map={"term_0": parts},
        kind_map={"term_0": compared},
    )
    placed = placed_contributions(table, Grid(1, 2), mode="weighted_sum")
    assert_equal(placed[0, :, 0].float(), [[0.4, 0.4], [-0.8, 0.0]])
    standardised = placed_contributions(table, Grid(1, 2), mode="normalize_then_sum")
    # Divided by the std of the scores, .8 / sqrt(2).
    torch.testing.assert_close(standardised, placed / (0.8 / 2**0.5))
    # Of .8, places have .2 - -.2 + .4.
    assert placed_share(table, mode="weighted_sum") == pytest.approx(1.0)


def test_a_zero_std_group_of_a_term_has_no_placed_contribution_once_standardised() -> None:
    # Rounding of the sum of parts must not be scaled up to a standard deviation of 1.
    parts = torch.tensor([[[[0.25, 0.75]], [[0.75, 0.25]]]])
    table = replace(make_table([[[1.0], [1.0]]], [1.0]), score_map={"term_0": parts})
    placed = placed_contributions(table, Grid(1, 2), mode="normalize_then_sum")
    assert placed.count_nonzero() == 0


def test_placed_share_is_the_share_of_the_variance_that_has_a_place() -> None:
    # Totals of the two images differ by 1.0, of which a place has 0.75: 0.5 and 0.25.
    raw = [[[1.0, 0.0], [0.25, -0.25]]]
    parts = torch.tensor([[[[0.5, 0.5]], [[0.0, 0.25]]]])
    table = replace(make_table(raw, [1.0, 1.0]), score_map={"term_0": parts})
    assert placed_share(table, mode="weighted_sum") == pytest.approx(0.75)
    without = replace(table, score_map={})
    assert placed_share(without, mode="weighted_sum") == 0.0


NAN = float("nan")


def refused_in(table: RewardTable, image: int, column: int) -> RewardTable:
    """The same where a term refused an image of every prompt."""
    raw = table.raw.clone()
    raw[:, image, column] = torch.nan
    return replace(table, raw=raw)


@pytest.mark.parametrize("mode", ["weighted_sum", "normalize_then_sum"])
def test_an_image_that_a_weighted_term_refused_leaves_a_smaller_group(mode: Mode) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 4, 2, 2, generator=generator)
    raw = torch.cat([parts.sum(dim=(2, 3))[..., None], torch.rand(3, 4, 2)], dim=2)
    mask = [[True, True, True], [True, False, True], [True, True, True]]
    table = make_table(raw.tolist(), [0.5, -0.2, 0.3], mask)
    refused = replace(refused_in(table, 1, 2), score_map={"term_0": parts})
    others = [0, 2, 3]
    smaller = replace(table, raw=table.raw[:, others], score_map={"term_0": parts[:, others]})

    found = contributions(refused, mode=mode)
    assert found[:, 1].isnan().all()
    assert combine(refused, mode=mode)[:, 1].isnan().all()
    assert found[:, others].equal(contributions(smaller, mode=mode))
    assert combine(refused, mode=mode)[:, others].equal(combine(smaller, mode=mode))
    placed = placed_contributions(refused, Grid(2, 2), mode=mode)
    assert placed[:, 1].isnan().all()
    expected = placed_contributions(smaller, Grid(2, 2), mode=mode)
    torch.testing.assert_close(placed[:, others], expected)
    shares = advantage_shares(smaller, mode=mode)
    assert_equal(advantage_shares(refused, mode=mode), shares.tolist())
    share = placed_share(smaller, mode=mode)
    assert placed_share(refused, mode=mode) == pytest.approx(share)


@pytest.mark.parametrize("mode", ["weighted_sum", "normalize_then_sum"])
def test_what_a_term_without_weight_refused_keeps_its_total(mode: Mode) -> None:
    table = make_table([[[0.1, 0.5], [0.3, 0.2], [0.2, 0.9]]], [1.0, 0.0])
    refused = refused_in(table, 1, 1)
    assert combine(refused, mode=mode).equal(combine(table, mode=mode))
    assert contributions(refused, mode=mode)[0, :, 1].tolist() == [0.0, 0.0, 0.0]


def test_refused_images_have_no_say_in_the_scale_of_evaluations() -> None:
    # Of 1, 3 and a refused one: mean 2, sample std sqrt(2). Scores of 2 and 4 give 0 and 2 / std.
    base = make_table([[[1.0]], [[3.0]], [[NAN]]], [1.0])
    later = make_table([[[2.0]], [[NAN]], [[4.0]]], [1.0])
    totals = combine(later, mode="normalize_then_sum", base_scores=base)
    assert totals[[0, 2]].flatten().tolist() == pytest.approx([0.0, 2 / math.sqrt(2)])
    assert totals[1].isnan().all()
    with pytest.raises(RewardError, match="term_0 .* scored no image"):
        combine(later, mode="normalize_then_sum", base_scores=make_table([[[NAN]]], [1.0]))


def test_a_group_with_fewer_than_two_scores_is_zero_std() -> None:
    scores = torch.tensor([[0.1, NAN, NAN], [NAN, NAN, NAN], [0.1, NAN, 0.2], [0.1, NAN, 0.1]])
    assert is_zero_std(scores).tolist() == [True, True, False, True]
    table = make_table([[[0.1], [NAN], [NAN]]], [1.0])
    assert_equal(combine(table, mode="normalize_then_sum").nan_to_num(9.0), [[0.0, 9.0, 9.0]])


def test_a_total_that_overflows_is_refused_beside_one_that_is_left_out() -> None:
    table = make_table([[[NAN, 1.0], [3e38, 1.0]]], [2.0, 1.0])
    with pytest.raises(RewardError, match="prompt row 0, image 1 is inf"):
        combine(table, mode="weighted_sum")
