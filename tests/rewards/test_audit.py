from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from rewards.audit import (
    audit_table,
    audit_total,
    correlations,
    distinct_scores,
    headroom,
    noise_fractions,
    saturation,
)
from rewards.types import RewardTable

NAN = float("nan")


def make_table(raw: list[list[list[float]]], mask: list[list[bool]] | None = None) -> RewardTable:
    """Raw scores by prompt, image and term, all of weight 1."""
    scores = torch.tensor(raw)
    terms = scores.shape[2]
    applicable = torch.ones(len(raw), terms, dtype=torch.bool)
    return RewardTable(
        names=("a", "b", "c")[:terms],
        raw=scores,
        is_applicable=applicable if mask is None else torch.tensor(mask),
        weights=torch.ones(terms),
        std_floors=torch.full((terms,), 1e-4),
    )


def by_term(*groups: list[list[float]]) -> list[list[list[float]]]:
    """One list per prompt, with one list of G scores per term."""
    return [torch.tensor(group).T.tolist() for group in groups]


def assert_equal(actual: Tensor, expected: object) -> None:
    wanted = torch.tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_audit_gives_mean_and_spreads_of_each_term() -> None:
    # Scores 0, 2 and 4, 8: mean 3.5, deviations -3.5, -1.5, 0.5, 4.5: variance 35 / 4 = 8.75.
    # Inside groups: variances 1 and 4, mean 2.5.
    term = audit_table(make_table(by_term([[0.0, 2.0]], [[4.0, 8.0]])), mode="weighted_sum").terms[
        0
    ]
    assert (term.name, term.mean) == ("a", 3.5)
    assert term.std == pytest.approx(math.sqrt(8.75))
    assert term.std_within == pytest.approx(math.sqrt(2.5))


def test_audit_counts_zero_std_groups() -> None:
    # One rounding apart counts as equal.
    near = torch.nextafter(torch.tensor(0.3), torch.tensor(1.0)).item()
    table = make_table(by_term([[0.3, near]], [[0.3, 0.4]], [[0.0, 0.0]], [[1.0, 2.0]]))
    assert audit_table(table, mode="weighted_sum").terms[0].zero_std_fraction == 0.5


def test_audit_leaves_masked_prompts_out_of_a_term() -> None:
    # Of the first term only prompt 0 counts: mean 1, std 1, inside and over all.
    table = make_table(
        by_term([[0.0, 2.0], [1.0, 1.0]], [[NAN, 9.0], [1.0, 3.0]]), [[True, True], [False, True]]
    )
    first = audit_table(table, mode="weighted_sum").terms[0]
    assert (first.mean, first.std, first.std_within) == (1.0, 1.0, 1.0)
    assert (first.zero_std_fraction, first.headroom, first.saturation) == (0.0, 1.0, 0.0)


def test_audit_is_undefined_for_a_term_that_applies_nowhere() -> None:
    table = make_table(by_term([[0.0, 0.0], [1.0, 2.0]]), [[False, True]])
    term = audit_table(table, mode="weighted_sum").terms[0]
    figures = (term.mean, term.std, term.std_within, term.zero_std_fraction)
    assert all(math.isnan(figure) for figure in (*figures, term.headroom, term.saturation))
    assert term.advantage_share == 0.0


def test_audit_has_the_headroom_of_the_total() -> None:
    # Totals 1, 3: best 3, mean 2. Each term alone: 3 - 1.5 and 1 - 0.5.
    table = make_table(by_term([[0.0, 3.0], [1.0, 0.0]]))
    assert audit_total(table, mode="weighted_sum").headroom == 1.0
    audit = audit_table(table, mode="weighted_sum")
    assert [term.headroom for term in audit.terms] == [1.5, 0.5]


def test_correlations_are_worked_out_inside_groups() -> None:
    # Over all images the terms rise together; inside each group one falls as the other rises.
    table = make_table(by_term([[0.0, 1.0], [1.0, 0.0]], [[100.0, 101.0], [101.0, 100.0]]))
    assert_equal(correlations(table), [[1.0, -1.0], [-1.0, 1.0]])


def test_correlations_pool_groups_by_their_spread() -> None:
    # Centred: (-1, 1) with (-1, 1), and (-3, 3) with (1, -1). Sum of products 2 - 6 = -4, of
    # squares 2 + 18 = 20 and 2 + 2 = 4: -4 / sqrt(80).
    table = make_table(by_term([[0.0, 2.0], [0.0, 2.0]], [[0.0, 6.0], [2.0, 0.0]]))
    assert_equal(correlations(table)[0, 1], -4 / math.sqrt(80))


def test_correlations_are_over_the_groups_to_which_both_apply() -> None:
    # Prompt 1 has the second term alone: by it the terms would correlate less than perfectly.
    table = make_table(
        by_term([[0.0, 1.0], [0.0, 1.0]], [[NAN, 0.0], [0.0, 5.0]]), [[True, True], [False, True]]
    )
    assert_equal(correlations(table), [[1.0, 1.0], [1.0, 1.0]])


def test_correlations_of_constant_or_never_common_terms_are_undefined() -> None:
    # The first term is constant but for rounding; the others have no prompt in common.
    near = torch.nextafter(torch.tensor(0.3), torch.tensor(1.0)).item()
    table = make_table(
        by_term([[0.3, near], [0.0, 1.0], [7.0, 7.0]], [[0.3, 0.3], [0.0, 0.0], [0.0, 1.0]]),
        [[True, True, False], [True, False, True]],
    )
    assert_equal(correlations(table), [[NAN, NAN, NAN], [NAN, 1.0, NAN], [NAN, NAN, 1.0]])


def test_headroom_is_best_minus_mean_averaged_over_prompts() -> None:
    # 3 - 1 = 2 and 5 - 5 = 0.
    assert headroom(torch.tensor([[0.0, 3.0, 0.0], [5.0, 5.0, 5.0]])) == 1.0


def test_saturation_counts_the_other_images_that_are_as_good_as_the_best() -> None:
    # One best of three: 0 of the 2 others; two best: 1 of 2; all: 2 of 2.
    near = torch.nextafter(torch.tensor(0.9), torch.tensor(0.0)).item()
    scores = torch.tensor([[0.1, 0.2, 0.3], [0.9, near, 0.1], [1.0, 1.0, 1.0]])
    assert saturation(scores) == 0.5
    assert saturation(-scores[:1]) == 0.0
    assert math.isnan(saturation(torch.tensor([[1.0]])))


def test_noise_fraction_is_the_quotient_of_mean_sample_variances() -> None:
    # Decoded 0, 2 and 0, 0: sample variances 2 and 0, mean 1. Groups 0, 3, 6 and 1, 1, 1: 9 and
    # 0, mean 4.5.
    table = make_table(by_term([[0.0, 3.0, 6.0]], [[1.0, 1.0, 1.0]]))
    decoded = torch.tensor(by_term([[0.0, 2.0]], [[0.0, 0.0]]))
    assert_equal(noise_fractions(decoded, table), [1 / 4.5])


def test_noise_fraction_is_over_applicable_prompts_and_not_clipped() -> None:
    # First term, prompt 0 alone: 2 / 0.5. Second: (2 + 2) / (0.5 + 0.5). Third: equal but for
    # rounding.
    near = torch.nextafter(torch.tensor(0.3), torch.tensor(1.0)).item()
    group = [[0.0, 1.0], [0.0, 1.0], [0.3, near]]
    table = make_table(by_term(group, [[NAN, 1.0], *group[1:]]), [[True] * 3, [False, True, True]])
    decoded = torch.tensor(by_term([[0.0, 2.0]] * 3, [[0.0, NAN], [0.0, 2.0], [0.0, 2.0]]))
    assert_equal(noise_fractions(decoded, table), [4.0, 4.0, NAN])


def test_audit_is_that_of_the_images_that_were_not_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    table = make_table(torch.rand(3, 4, 2, generator=generator).tolist())
    smaller = dataclasses.replace(table, raw=table.raw[:, [0, 1, 3]])
    # By one term alone: the image is left out of the total, and the other term's own figures stay.
    table.raw[:, 2, 0] = NAN
    found, expected = (audit_table(each, mode="weighted_sum") for each in (table, smaller))
    assert dataclasses.astuple(found.terms[0]) == pytest.approx(
        dataclasses.astuple(expected.terms[0])
    )
    assert found.terms[1].advantage_share == pytest.approx(expected.terms[1].advantage_share)
    assert found.terms[1].mean == pytest.approx(table.raw[:, :, 1].mean().item())
    totals = (audit_total(each, mode="weighted_sum").headroom for each in (table, smaller))
    assert next(totals) == pytest.approx(next(totals))
    assert_equal(found.correlations, expected.correlations.tolist())


def test_distinct_scores_are_counted_in_each_group() -> None:
    # Two levels but for rounding, three, one beside a refused image; no image of the last was
    # scored.
    near = torch.nextafter(torch.tensor(0.9), torch.tensor(0.0)).item()
    scores = [[0.9, near, 0.1], [0.1, 0.2, 0.3], [0.5, 0.5, NAN], [NAN, NAN, NAN]]
    assert distinct_scores(torch.tensor(scores)) == 2.0


def test_audit_tells_groups_with_only_the_worst_from_those_with_only_the_best_score() -> None:
    groups = [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.5, 0.5]]
    term = audit_table(make_table(by_term(*([group] for group in groups))), mode="weighted_sum")
    first = term.terms[0]
    assert (first.zero_std_fraction, first.all_worst, first.all_best) == (0.8, 0.2, 0.4)
