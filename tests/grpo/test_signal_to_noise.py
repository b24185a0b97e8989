"""Expected values are worked out by hand beside each test."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from glm_grpo.grpo.signal_to_noise import compare_signals, measure_agreement


def products_of(*ways: list[list[float]]) -> Tensor:
    """Inner products of gradients, by way and batch."""
    gradients = torch.tensor(ways, dtype=torch.float64)
    return torch.einsum("aix,bjx->abij", gradients, gradients)


FIRST = [[2.0, 1.0], [2.0, -1.0], [1.0, 0.0]]
SECOND = [[2.0, 0.0], [2.0, 1.0], [2.0, -1.0]]


def test_signal_is_what_batches_share_and_noise_is_the_rest() -> None:
    first, second = compare_signals(products_of(FIRST, SECOND))
    # Between batches 3, 2, 2, of each with itself 5, 5, 1: signal 7/3, noise 11/3 - 7/3.
    assert first.ratio == pytest.approx(7 / 4)
    assert (first.relative, first.low, first.high) == (1.0, 1.0, 1.0)
    assert first.cosine == pytest.approx(1.0)
    # 4, 4, 3 and 4, 5, 5: signal 11/3, noise 1.
    assert second.ratio == pytest.approx(11 / 3)
    assert second.relative == pytest.approx(44 / 21)
    # Sums are (5, 0) and (6, 0), equal batches give 4 + 3 + 2: a mean of 21 / 6 between others.
    assert second.cosine == pytest.approx(3.5 / math.sqrt(7 / 3 * 11 / 3))
    # Along the first mean gradient, 3.5 and 7/3, by lengths whose mean squares are 14/3 and 11/3.
    assert first.gain == 1.0
    assert second.gain == pytest.approx(1.5 * math.sqrt(11 / 14))


def test_interval_leaves_out_one_batch_at_a_time() -> None:
    _, second = compare_signals(products_of(FIRST, SECOND))
    # Without the first batch: signals 2 and 3, noises 1 and 2. Without the second: 2 and 4, 1 and
    # 1/2. Without the third: 3 and 4, 2 and 1/2.
    logs = [math.log(1.5 / 2), math.log(8 / 2), math.log(8 / 1.5)]
    # 4.3027 standard errors of Student's t with two degrees of freedom.
    half = 4.302653 * math.sqrt(2 * statistics.pvariance(logs))
    assert math.log(second.low) == pytest.approx(math.log(44 / 21) - half, abs=1e-6)
    assert math.log(second.high) == pytest.approx(math.log(44 / 21) + half, abs=1e-6)


def test_scale_of_a_gradient_does_not_matter() -> None:
    _, twice = compare_signals(products_of(FIRST, [[2 * x for x in row] for row in FIRST]))
    found = [twice.relative, twice.low, twice.high, twice.cosine, twice.gain]
    assert found == pytest.approx([1.0] * 5)


def test_two_batches_have_no_interval() -> None:
    _, second = compare_signals(products_of(FIRST[:2], SECOND[:2]))
    # Signals 3 and 4, noises 2 and 1/2.
    assert second.relative == pytest.approx(8 / 1.5)
    assert math.isnan(second.low)
    assert math.isnan(second.high)


@pytest.mark.parametrize(
    ("others", "ratio"),
    [
        # Signal -1, noise 1 + 1: opposed batches. Signal and noise 0: nothing to learn.
        ([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], -1 / 3),
        ([[0.0, 0.0]] * 3, math.nan),
    ],
)
def test_what_has_no_signal_is_not_compared(others: list[list[float]], ratio: float) -> None:
    _, second = compare_signals(products_of(FIRST, others))
    assert second.ratio == pytest.approx(ratio, nan_ok=True)
    found = [second.relative, second.low, second.high, second.cosine, second.gain]
    assert found == pytest.approx([math.nan] * 5, nan_ok=True)


def test_agreement_is_tested_by_the_products_of_different_batches() -> None:
    gradients = torch.tensor(FIRST, dtype=torch.float64)
    found = measure_agreement(gradients @ gradients.T)
    assert found.ratio == pytest.approx(7 / 4)
    # Products 3, 2, 2: mean 7/3, std 0.577, of three t = 7, by tables p = 0.0099 one-sided.
    assert found.chance == pytest.approx(0.0099, abs=1e-4)
    # Ratios without one batch 2 / 1, 2 / 1 and 3 / 2.
    half = 4.302653 * math.sqrt(2 * statistics.pvariance([2.0, 2.0, 1.5]))
    assert (found.low, found.high) == pytest.approx((7 / 4 - half, 7 / 4 + half))


def test_agreement_of_gradients_that_are_zero_is_undefined() -> None:
    found = measure_agreement(torch.zeros(4, 4, dtype=torch.float64))
    assert all(math.isnan(value) for value in vars(found).values())


@pytest.mark.parametrize("dimensions", [10, 100])
def test_chance_finds_a_direction_about_as_often_as_its_level_says(dimensions: int) -> None:
    generator = torch.Generator().manual_seed(dimensions)
    gradients = torch.randn(400, 8, dimensions, dtype=torch.float64, generator=generator)
    chances = [measure_agreement(each @ each.T).chance for each in gradients]
    # 20 are expected at the level, with a standard deviation of 4.4.
    assert 6 < sum(chance < 0.05 for chance in chances) < 42
    # A mean as long as the noise of 100 dimensions is long: SNR 0.1 and more.
    shared = torch.randn(dimensions, dtype=torch.float64, generator=generator)
    moved = gradients + 0.6 * shared
    found = [measure_agreement(each @ each.T).chance < 0.05 for each in moved]
    assert sum(found) > 390
