from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from glm_grpo.training.monitors.recheck import compare_ranks, spearman_correlations
from rewards.types import RewardTable


def correlate(first: list[float], second: list[float]) -> float:
    return spearman_correlations(torch.tensor([first]), torch.tensor([second])).item()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # Only the order counts.
        ([0.1, 0.2, 0.9], [-5.0, 0.0, 0.1], 1.0),
        ([1.0, 2.0], [0.3, 0.2], -1.0),
        # One pair of neighbours swapped: 1 - 6 * (1 + 1) / (3 * 8).
        ([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], 0.5),
        # Ranks 1.5, 1.5, 3 against 1, 2, 3: centred (-0.5, -0.5, 1) and (-1, 0, 1), so
        # 1.5 / sqrt(1.5 * 2).
        ([1.0, 1.0, 2.0], [1.0, 2.0, 3.0], math.sqrt(0.75)),
        # The same images tied in both.
        ([0.0, 0.0, 1.0, 1.0], [3.0, 3.0, 4.0, 4.0], 1.0),
        # Flat in one alone, up to the rounding of fp32.
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], 0.0),
        ([1.0, 2.0, 3.0], [1.0, 1.0 + 1e-7, 1.0], 0.0),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], math.nan),
        # An image was refused.
        ([1.0, math.nan, 3.0], [1.0, 2.0, 3.0], math.nan),
        ([math.nan, math.nan, math.nan], [1.0, 2.0, 3.0], math.nan),
    ],
)
def test_spearman_correlations_by_hand(
    first: list[float], second: list[float], expected: float
) -> None:
    assert correlate(first, second) == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert correlate(second, first) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_spearman_correlations_stay_inside_their_group() -> None:
    first = torch.tensor([[1.0, 2.0, 3.0], [30.0, 20.0, 10.0]])
    second = torch.tensor([[100.0, 200.0, 300.0], [1.0, 2.0, 3.0]])
    assert spearman_correlations(first, second).tolist() == [1.0, -1.0]


def make_table(raw: Tensor) -> RewardTable:
    """Two terms, weights 1 and 3; the second applies to the first prompt alone."""
    return RewardTable(
        names=("ssim", "ocr"),
        raw=raw,
        is_applicable=torch.tensor([[True, True], [True, False]]),
        weights=torch.tensor([1.0, 3.0]),
        std_floors=torch.tensor([1e-4, 1e-4]),
    )


FULL = torch.tensor([[[0.1, 0.0], [0.2, 0.5], [0.3, 1.0]], [[0.1, 9.0], [0.2, 9.0], [0.3, 9.0]]])
"""Raw scores, prompts by images by terms; what stands where a term does not apply is no score."""


def test_compare_ranks_averages_the_groups_to_which_a_term_applies() -> None:
    cheap = FULL.clone()
    cheap[1, :, 0] = torch.tensor([0.1, 0.3, 0.2])
    cheap[1, :, 1] = torch.tensor([3.0, 2.0, 1.0])

    agreement = compare_ranks(make_table(cheap), make_table(FULL), mode="weighted_sum")

    # ssim: 1 in the first group and 0.5 in the second, which is all there is to its total.
    assert agreement.terms == pytest.approx({"ssim": 0.75, "ocr": 1.0})
    assert agreement.total == pytest.approx(0.75)


def test_compare_ranks_weighs_the_terms_as_the_run_does() -> None:
    cheap = FULL.clone()
    cheap[0, :, 0] = torch.tensor([0.3, 0.2, 0.1])
    tables = (make_table(cheap), make_table(FULL))

    # ocr has three times the weight and keeps its order: 0.3, 1.7, 3.1 rises as before.
    agreement = compare_ranks(*tables, mode="weighted_sum")
    assert agreement.terms["ssim"] == pytest.approx((-1 + 1) / 2)
    assert agreement.total == pytest.approx(1.0)
    # With the weights turned round, standardised scores follow ssim: -1 in the first group.
    turned = [replace(table, weights=torch.tensor([3.0, 1.0])) for table in tables]
    assert compare_ranks(*turned, mode="normalize_then_sum").total == pytest.approx((-1 + 1) / 2)


def test_compare_ranks_has_no_value_without_an_order() -> None:
    flat = torch.zeros(2, 3, 2)
    agreement = compare_ranks(make_table(flat), make_table(flat), mode="weighted_sum")
    assert math.isnan(agreement.total)
    assert all(math.isnan(value) for value in agreement.terms.values())


def test_compare_ranks_leaves_groups_without_an_order_out() -> None:
    cheap, full = FULL.clone(), FULL.clone()
    cheap[1], full[1] = 0.5, 0.7
    assert compare_ranks(make_table(cheap), make_table(full), mode="weighted_sum").total == 1.0


def test_compare_ranks_counts_a_term_that_applies_nowhere_as_without_value() -> None:
    nowhere = torch.tensor([[True, False], [True, False]])
    table = replace(make_table(FULL), is_applicable=nowhere)
    agreement = compare_ranks(table, table, mode="weighted_sum")
    assert math.isnan(agreement.terms["ocr"])
    assert agreement.total == pytest.approx(1.0)
