"""Weights that move: shares that hold, bounds that push."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rewards.reweigh import Mode, advantage_shares, units_of
from rewards.steering import Steering, begin, move, tables_in_force, weigh
from rewards.types import RewardTable

SHARES = Steering(combine="shares", at_least={}, share_rate=0.3, bound_rate=0.1, bound_max=10.0)
NAMES = ("lpips", "ocr", "look")


def make_table(
    spreads: tuple[float, ...], *, seed: int = 0, asked: tuple[float, ...] = (0.5, 0.3, 0.2)
) -> RewardTable:
    """Terms of given spreads."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(8, 8, len(NAMES), generator=generator)
    return RewardTable(
        names=NAMES,
        raw=raw * torch.tensor(spreads) + 0.5,
        is_applicable=torch.ones(8, len(NAMES), dtype=torch.bool),
        weights=torch.tensor(asked),
        std_floors=torch.full((len(NAMES),), 1e-4),
    )


def drifting_steps(steps: int) -> list[RewardTable]:
    """The spread of the first term falls to a tenth, that of the second stays."""
    return [
        make_table((0.2 * 0.1 ** (step / steps), 0.3, 0.01), seed=step) for step in range(steps)
    ]


def late_shares(tables: list[RewardTable], mode: Mode) -> torch.Tensor:
    return torch.stack([advantage_shares(table, mode=mode) for table in tables[-20:]]).mean(dim=0)


def test_shares_hold_where_fixed_weights_drift() -> None:
    steps = drifting_steps(60)
    asked = torch.tensor([0.5, 0.3, 0.2])
    fixed = late_shares(steps, "weighted_sum")
    held = late_shares(tables_in_force(steps, SHARES), "shares")
    assert (fixed - asked).abs().max() > 0.3
    assert (held - asked).abs().max() < 0.06


def test_a_step_has_weights_of_the_steps_before_it_alone() -> None:
    steps = drifting_steps(6)
    weighted = tables_in_force(steps, SHARES)
    others = [*steps[:4], *(replace(step, raw=step.raw.flip(0, 1) * 3) for step in steps[4:])]
    reweighed = tables_in_force(others, SHARES)
    for first, second in zip(weighted[:5], reweighed[:5], strict=True):
        assert torch.equal(first.weights, second.weights)
    assert not torch.equal(weighted[5].weights, reweighed[5].weights)


def test_a_term_that_tells_few_groups_apart_does_not_take_the_others_away() -> None:
    # It varies in one group of eight: its share cannot be above 1/8 of all.
    steps = [make_table((0.2, 0.3, 0.01), seed=seed) for seed in range(80)]
    for step in steps:
        step.raw[1:, :, 0] = 0.5
    weighted = tables_in_force(steps, SHARES)
    assert weighted[-1].weights.max() < 0.9
    shares = late_shares(weighted, "shares")
    # In one group (0.5, 0.3, 0.2), in seven (0, 0.6, 0.4).
    assert shares.tolist() == pytest.approx([0.0625, 0.5625, 0.375], abs=0.06)


BOUND = Steering(
    combine="weighted_sum",
    at_least={"ocr": 0.6},
    share_rate=0.3,
    bound_rate=0.1,
    bound_max=0.25,
)


def test_a_multiplier_grows_by_the_distance_in_spreads_below_the_bound() -> None:
    table = make_table((0.2, 0.3, 0.01))
    at = begin(table)
    moved = move(table, at, BOUND)
    mean, spread = at.units[1]
    assert 0.2 < (0.6 - mean) / spread < 1
    assert moved.multipliers == pytest.approx((0, 0.1 * (0.6 - mean) / spread, 0), rel=1e-5)
    # Far from its bound it does not jump.
    far = move(table, at, replace(BOUND, at_least={"ocr": 100.0}))
    assert far.multipliers == (0, 0.1, 0)
    assert moved.weights == at.weights


def test_a_multiplier_stops_at_its_maximum_and_falls_back_to_zero() -> None:
    low, high = make_table((0.2, 0.3, 0.01)), make_table((0.2, 0.3, 0.01))
    high.raw[..., 1] += 2.0
    at = begin(low)
    for _ in range(30):
        at = move(low, at, BOUND)
    assert at.multipliers == (0, 0.25, 0)
    for _ in range(30):
        at = move(high, at, BOUND)
    assert at.multipliers == (0, 0, 0)


def test_a_multiplier_of_one_is_the_weight_of_all_terms_together() -> None:
    table = make_table((0.2, 0.3, 0.01), asked=(0.5, 0.0, 0.2))
    at = replace(begin(table), multipliers=(0.0, 1.0, 0.0))
    weights = weigh(table, at, BOUND).weights
    stds = units_of(table)[:, 1]
    assert (weights[1] * stds[1]).item() == pytest.approx(
        (0.5 * stds[0] + 0.2 * stds[2]).item(), rel=1e-5
    )
    assert weights[[0, 2]].tolist() == pytest.approx([0.5, 0.2])
    standardised = weigh(table, at, replace(BOUND, combine="normalize_then_sum")).weights
    assert standardised.tolist() == pytest.approx([0.5, 0.7, 0.2])
