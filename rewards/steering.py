"""Adapt reward weights to keep requested shares of the advantage and minimum scores.

Shares. A term's share of what tells the images of a group apart (`reweigh.advantage_shares`) moves
although weights do not: where pictures get equal in one term, another one decides. Under `shares`
the weights are moved instead. After every step, with b the shares asked for and s those measured,

    log w_r <- log w_r + rate * (b_r - s_r) / max(b_r, 0.05)

for the terms that told some images apart, and the weights are scaled to add up to 1. In groups in
which a term is flat, or does not apply, its share is that of the others: else it would be made up
for without end in the groups where the term varies.

Bounds. A term with `at_least` has a multiplier m >= 0 of its own, which grows while its mean score
is below the bound:

    m_r <- clip(m_r + rate * clip((bound_r - mean_r) / spread_r, -1, 1), 0, maximum)

It is added to the term's weight, in units in which 1 is the weight of all terms together; under
`shares` to the share asked for. This is gradient ascent of the Lagrange function in m.
Source: Stooke et al. 2020 (arXiv 2007.03964), section 2; Moskovitz et al. 2023 (arXiv 2310.04373).

Everything here is a function of the scores of the steps in their order: `rescore` and the gallery
compute it again from the stored tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from rewards.reweigh import Mode, advantage_shares, contributions, is_flat, units_of
from rewards.types import RewardTable

_LEAST_SHARE = 0.05
"""Divisor of the difference, so that a term of little share does not jump."""
_LARGEST_STEP = 2.0
"""Of that quotient."""
_FURTHEST = 100.0
"""Factor by which a weight may leave the share asked for."""


@dataclass(frozen=True)
class Steering:
    """How weights move; the values of `RewardConfig`.

    Attributes:
        at_least: Bounds by name of the term.
    """

    combine: Mode
    at_least: Mapping[str, float]
    share_rate: float
    bound_rate: float
    bound_max: float


@dataclass(frozen=True)
class MovingWeights:
    """Where the weights stand before a step; numbers in the order of the terms.

    Attributes:
        units: Mean and spread of each term in the first step, see `reweigh.units_of`.
        weights: Under `shares`: of scores in these units, adding up to 1.
        multipliers: Of the bounds; 0 for terms without one.
    """

    units: tuple[tuple[float, float], ...]
    weights: tuple[float, ...]
    multipliers: tuple[float, ...]


def begin(table: RewardTable) -> MovingWeights:
    """Where weights stand before the first step.

    Args:
        table: Raw scores of that step, its weights those asked for.
    """
    asked = table.weights.double()
    return MovingWeights(
        units=tuple((mean, std) for mean, std in units_of(table).tolist()),
        weights=tuple((asked / asked.abs().sum()).tolist()),
        multipliers=(0.0,) * len(asked),
    )


def weigh(table: RewardTable, at: MovingWeights, steering: Steering) -> RewardTable:
    """The scores of a step with the weights that are in force there.

    Args:
        table: Raw scores, its weights those asked for.
        at: Before this step.
    """
    if steering.combine == "shares":
        weights = torch.tensor(at.weights, dtype=torch.float64)
        return replace(table, weights=weights.float(), units=torch.tensor(at.units))
    asked = table.weights.double()
    stds = torch.tensor([std for _, std in at.units], dtype=torch.float64)
    if steering.combine == "normalize_then_sum":
        stds = torch.ones_like(stds)
    whole = (asked.abs() * stds).sum()
    multipliers = torch.tensor(at.multipliers, dtype=torch.float64)
    return replace(table, weights=(asked + multipliers * whole / stds).float())


def move(table: RewardTable, at: MovingWeights, steering: Steering) -> MovingWeights:
    """Where weights stand after a step.

    Args:
        table: All raw scores of the step, its weights those asked for.
        at: Before this step.
    """
    multipliers = _moved_multipliers(table, at, steering)
    weights = at.weights
    if steering.combine == "shares":
        weights = _moved_weights(table, replace(at, multipliers=multipliers), steering)
    return MovingWeights(at.units, weights, multipliers)


def tables_in_force(steps: Sequence[RewardTable], steering: Steering | None) -> list[RewardTable]:
    """The scores of all steps of a run with the weights that are in force in each.

    Args:
        steps: In their order, from the first; weights those asked for.
        steering: None: these are the weights in force.
    """
    if steering is None:
        return list(steps)
    weighted, at = [], None
    for table in steps:
        at = begin(table) if at is None else at
        weighted.append(weigh(table, at, steering))
        at = move(table, at, steering)
    return weighted


def _moved_weights(table: RewardTable, at: MovingWeights, steering: Steering) -> tuple[float, ...]:
    in_force = weigh(table, at, steering)
    wanted = _wanted_shares(table, at)
    measured = advantage_shares(in_force, mode="shares").double()
    reachable = _reachable_shares(in_force, wanted)
    step = (reachable - measured) / reachable.clamp(min=_LEAST_SHARE)
    step = step.clamp(-_LARGEST_STEP, _LARGEST_STEP).masked_fill(reachable == 0, 0.0)
    # A term without a share gets one by its multiplier.
    weights = torch.tensor(at.weights, dtype=torch.float64)
    weights = torch.where((weights == 0) & (wanted > 0), wanted, weights)
    weights = weights * torch.exp(steering.share_rate * step)
    weights = weights.clamp(wanted / _FURTHEST, wanted * _FURTHEST)
    return tuple((weights / weights.sum()).tolist())


def _reachable_shares(
    in_force: RewardTable, wanted: Float64[Tensor, " R"]
) -> Float64[Tensor, " R"]:
    """What can be had of the shares: in each group, the part among the terms that vary there.

    The mean over the groups whose totals vary; all 0 where there is none.
    """
    parts = contributions(in_force, mode="shares")
    of_groups = wanted * ~is_flat(parts)
    of_groups = of_groups[~is_flat(parts.sum(dim=-1)) & (of_groups > 0).any(dim=1)]
    if len(of_groups) == 0:
        return torch.zeros_like(wanted)
    return (of_groups / of_groups.sum(dim=1, keepdim=True)).mean(dim=0)


def _wanted_shares(table: RewardTable, at: MovingWeights) -> Float64[Tensor, " R"]:
    asked = table.weights.double()
    wanted = asked / asked.sum() + torch.tensor(at.multipliers, dtype=torch.float64)
    return wanted / wanted.sum()


def _moved_multipliers(
    table: RewardTable, at: MovingWeights, steering: Steering
) -> tuple[float, ...]:
    moved = list(at.multipliers)
    for name, bound in steering.at_least.items():
        column = table.names.index(name)
        applies = table.is_applicable[:, column]
        if not applies.any():
            continue
        mean = table.raw[applies, :, column].double().mean().item()
        distance = min(max((bound - mean) / at.units[column][1], -1.0), 1.0)
        gain = steering.bound_rate * distance
        moved[column] = min(max(moved[column] + gain, 0.0), steering.bound_max)
    return tuple(moved)
