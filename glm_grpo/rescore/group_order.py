"""How other totals change the order of the images inside their groups."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float32, Int8
from torch import Tensor

from rewards.reweigh import FLAT_TOLERANCE


def winner_changes(
    before: Float32[Tensor, "P G"], after: Float32[Tensor, "P G"]
) -> Bool[Tensor, " P"]:
    """Whether none of a group's best images is among its best any more.

    Totals within `FLAT_TOLERANCE` of the highest count as best: a flat group has no winner to lose.
    """
    return ~(_is_best(before) & _is_best(after)).any(dim=1)


def kendall_taus(
    before: Float32[Tensor, "P G"], after: Float32[Tensor, "P G"]
) -> Float32[Tensor, " P"]:
    """Kendall's tau-b of each group; NaN where a group is flat before or after.

    With C pairs in the same order, D in the opposite one, N all pairs and T those tied:

        tau_b = (C - D) / sqrt((N - T_before) (N - T_after))

    Source: Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945). Totals that
    differ by no more than `FLAT_TOLERANCE` of the group's largest are tied, as in the report's
    comparing.js; for scipy's `kendalltau` only equal ones are.
    """
    order_before, order_after = _pair_orders(before), _pair_orders(after)
    agreement = (order_before * order_after).sum(dim=1, dtype=torch.float64)
    untied = order_before.abs().sum(dim=1, dtype=torch.float64)
    untied *= order_after.abs().sum(dim=1, dtype=torch.float64)
    return (agreement / untied.sqrt()).float()


def _is_best(totals: Float32[Tensor, "P G"]) -> Bool[Tensor, "P G"]:
    return totals >= totals.amax(dim=1, keepdim=True) - _tolerance(totals)


def _pair_orders(totals: Float32[Tensor, "P G"]) -> Int8[Tensor, "P pairs"]:
    """1, -1 or 0 for every pair of a group: which of the two is higher, or neither."""
    first, second = torch.triu_indices(totals.shape[1], totals.shape[1], offset=1)
    differences = totals[:, first] - totals[:, second]
    is_tied = differences.abs() <= _tolerance(totals)
    return differences.sign().to(torch.int8).masked_fill(is_tied, 0)


def _tolerance(totals: Float32[Tensor, "P G"]) -> Float32[Tensor, "P 1"]:
    return FLAT_TOLERANCE * totals.abs().amax(dim=1, keepdim=True)
