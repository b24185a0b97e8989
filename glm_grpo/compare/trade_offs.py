"""Which runs trade one term for another, and which are beaten in both."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from glm_grpo.compare.comparison import ComparedRun, TradeOff

_MOST_TRADE_OFFS = 6
"""Pairs of terms that are drawn: all of up to four terms."""


def pareto_optimal(points: Float64[Tensor, "N D"]) -> Bool[Tensor, " N"]:
    """Which points no other point is at least as high as in all, and higher than in one."""
    others, own = points[None, :, :], points[:, None, :]
    is_beaten = (others >= own).all(dim=-1) & (others > own).any(dim=-1)
    return ~is_beaten.any(dim=1)


def find_trade_offs(
    runs: Sequence[ComparedRun], untrained: Mapping[str, float], weights: Mapping[str, float]
) -> tuple[TradeOff, ...]:
    """Hold two terms against each other: which runs are Pareto-optimal after training.

    Args:
        runs: After training.
        untrained: Mean raw score by term; its order gives the order of the pairs, of which the
            first six are taken.
        weights: Of the yardstick; a term of negative weight is better where it is lower.
    """
    pairs = itertools.islice(itertools.combinations(untrained, 2), _MOST_TRADE_OFFS)
    found = []
    for pair in pairs:
        signs = [-1.0 if weights.get(name, 0.0) < 0 else 1.0 for name in pair]
        points = torch.tensor(
            [
                [sign * terms[name] for sign, name in zip(signs, pair, strict=True)]
                for terms in (untrained, *(run.terms for run in runs))
            ],
            dtype=torch.float64,
        )
        is_optimal = pareto_optimal(points)[1:].tolist()
        found.append(TradeOff(*pair, is_optimal=tuple(is_optimal)))
    return tuple(found)
