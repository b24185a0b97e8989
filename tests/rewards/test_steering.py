"""Weights that move: shares that hold, bounds that push."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rewards.reweigh import Mode, advantage_shares, combine, units_of
from rewards.steering import MovingWeights, Steering, begin, move, tables_in_force, weigh
from rewards.types import RewardTable

SHARES = Steering(combine="shares", at_least={}, share_rate=0.3, bound_rate=0.1, bound_max=10.0)
NAMES = ("lpips", "ocr", "look")


def make_table(
    spreads: tuple[float, ...],
    *,
    seed: int = 0,
    asked: tuple[float, ...] = (0.5, 0.3, 0.2),
    groups: int = 8,
    correlation: float = 0.0,
) -> RewardTable:
    """Terms of given spreads; the first two correlated."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(groups, 8, len(NAMES), generator=generator)
    raw[..., 1] = correlation * raw[..., 0] + (1 - correlation**2) ** 0.5 * raw[..., 1]
    return RewardTable(
        names=NAMES,
        raw=raw * torch.tensor(spreads) + 0.5,
        is_applicable=torch.ones(groups, len(NAMES), dtype=torch.bool),
        weights=torch.tensor(asked),
        std_floors=torch.full((len(NAMES),), 1e-4),
    )


def drifting_steps(steps: int, *, correlation: float = 0.0) -> list[RewardTable]:
    """The spread of the first term falls to a tenth, that of the second stays."""
    return [
        make_table((0.2 * 0.1 ** (step / steps), 0.3, 0.01), seed=step, correlation=correlation)
        for step in range(steps)
    ]


def late_shares(tables: list[RewardTable], mode: Mode) -> torch.Tensor:
    return torch.stack([advantage_shares(table, mode=mode) for table in tables[-20:]]).mean(dim=0)


@pytest.mark.parametrize("correlation", [0.0, 0.8, -0.5])
def test_shares_hold_where_fixed_weights_drift(correlation: float) -> None:
    steps = drifting_steps(60, correlation=correlation)
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


def test_the_first_step_has_the_shares_asked_for_as_weights_of_equal_spreads() -> None:
    table = make_table((0.2, 0.3, 0.01), asked=(5.0, 3.0, 2.0))
    (first,) = tables_in_force([table], SHARES)
    torch.testing.assert_close(first.weights, torch.tensor([0.5, 0.3, 0.2]))
    assert first.units is not None
    torch.testing.assert_close(first.units, units_of(table))
    inside = table.raw - table.raw.mean(dim=1, keepdim=True)
    torch.testing.assert_close(first.units[:, 1], inside.square().mean(dim=(0, 1)).sqrt())
    # Totals of the first step have mean 0: later ones tell how many spreads better they are.
    assert combine(first, mode="shares").mean().abs() < 1e-6


def test_units_do_not_move_with_the_weights() -> None:
    weighted = tables_in_force(drifting_steps(5), SHARES)
    assert all(torch.equal(each.units, weighted[0].units) for each in weighted)  # type: ignore[arg-type]


def test_weights_add_up_to_one_and_a_term_without_share_has_none() -> None:
    steps = [make_table((0.2, 0.3, 0.01), seed=seed, asked=(0.5, 0.5, 0.0)) for seed in range(9)]
    for table in tables_in_force(steps, SHARES):
        assert table.weights.sum().item() == pytest.approx(1.0)
        assert table.weights[2] == 0


def test_a_term_that_tells_nothing_apart_keeps_its_weight_until_it_does() -> None:
    steps = [make_table((0.2, 0.3, 0.01), seed=seed) for seed in range(40)]
    for step in steps:
        step.raw[..., 2] = 0.25
    at = begin(steps[0])
    before = at.weights[2]
    for step in steps:
        at = move(step, at, SHARES)
    # Scaled with the others, which move a little among themselves.
    assert at.weights[2] == pytest.approx(before, rel=0.1)
    varied = make_table((0.2, 0.3, 5.0), seed=99)
    assert move(varied, at, SHARES).weights[2] < at.weights[2]


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_term_that_tells_few_groups_apart_does_not_take_the_others_away(is_flat: bool) -> None:
    # It varies, or applies, in one group of eight: its share cannot be above 1/8 of all.
    steps = [make_table((0.2, 0.3, 0.01), seed=seed) for seed in range(80)]
    for step in steps:
        if is_flat:
            step.raw[1:, :, 0] = 0.5
        else:
            step.is_applicable[1:, 0] = False
    weighted = tables_in_force(steps, SHARES)
    assert weighted[-1].weights.max() < 0.9
    shares = late_shares(weighted, "shares")
    # In one group (0.5, 0.3, 0.2), in seven (0, 0.6, 0.4).
    assert shares.tolist() == pytest.approx([0.0625, 0.5625, 0.375], abs=0.06)


def test_steps_whose_totals_are_all_equal_move_nothing() -> None:
    table = make_table((0.0, 0.0, 0.0))
    at = begin(make_table((0.2, 0.3, 0.01)))
    assert move(table, at, SHARES).weights == pytest.approx(at.weights)


def test_scores_that_are_all_equal_at_first_have_a_unit_of_one() -> None:
    # As OCR where no word can be read yet.
    table = make_table((0.2, 0.0, 0.01))
    assert units_of(table)[1].tolist() == [0.5, 1.0]
    apart = replace(table, raw=table.raw + torch.arange(8.0)[:, None, None])
    # Equal inside groups, and unlike between them.
    assert units_of(apart)[1, 1].item() == pytest.approx(torch.arange(8.0).std(correction=0).item())


def test_terms_that_do_not_apply_have_no_say_in_units() -> None:
    table = make_table((0.2, 0.3, 0.01))
    masked = replace(
        table,
        raw=torch.cat([table.raw, torch.full_like(table.raw, 7.0)]),
        is_applicable=torch.cat([table.is_applicable, torch.zeros_like(table.is_applicable)]),
    )
    torch.testing.assert_close(units_of(masked), units_of(table))


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


def test_a_multiplier_adds_to_the_share_asked_for() -> None:
    steering = replace(SHARES, at_least={"ocr": 5.0}, bound_rate=0.5, bound_max=1.0)
    steps = [make_table((0.2, 0.3, 0.1), seed=seed) for seed in range(60)]
    held = late_shares(tables_in_force(steps, steering), "shares")
    # (0.3 + 1) / 2, and half of what was asked for of the others.
    assert held.tolist() == pytest.approx([0.25, 0.65, 0.1], abs=0.06)


def test_a_bound_reads_the_prompts_to_which_its_term_applies() -> None:
    table = make_table((0.2, 0.3, 0.01))
    table.is_applicable[4:, 1] = False
    table.raw[4:, :, 1] = 0.0
    at = begin(table)
    mean = table.raw[:4, :, 1].mean().item()
    moved = move(table, at, BOUND)
    assert moved.multipliers[1] == pytest.approx(0.1 * (0.6 - mean) / at.units[1][1], rel=1e-4)
    table.is_applicable[:, 1] = False
    assert move(table, moved, BOUND).multipliers == moved.multipliers


def test_no_steering_leaves_tables_as_they_are() -> None:
    steps = drifting_steps(3)
    assert tables_in_force(steps, None) == steps


def test_evaluations_are_measured_by_the_untrained_model_with_the_shares_asked_for() -> None:
    untrained, now = make_table((0.2, 0.3, 0.01)), make_table((0.2, 0.3, 0.01), seed=5)
    as_shares = combine(now, mode="shares", untrained=untrained)
    assert torch.equal(as_shares, combine(now, mode="normalize_then_sum", untrained=untrained))


def test_moving_weights_are_plain_numbers() -> None:
    at = begin(make_table((0.2, 0.3, 0.01)))
    assert isinstance(at, MovingWeights)
    flat = [*at.weights, *at.multipliers, *(each for unit in at.units for each in unit)]
    assert {type(each) for each in flat} == {float}
