"""Find weights that give each term a requested share of the advantage."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float32, Float64
from scipy.optimize import least_squares, minimize
from torch import Tensor

from rewards.audit.audit import CONFLICT_THRESHOLD, correlations
from rewards.reweigh import Mode, advantage_shares, contributions, is_flat
from rewards.types import RewardTable

Array = npt.NDArray[np.float64]

SHARE_TOLERANCE = 0.02
"""Largest allowed difference between a requested share and the resulting one."""
SUM_TOLERANCE = 1e-6
"""Largest allowed difference between 1 and the sum of the requested shares."""

_GOOD_ENOUGH = 1e-4
"""Difference at which no further starting point is tried."""
_STARTS = 8
_LOG_RANGE = 12.0
"""Bound on |log weight| of a term scaled to unit spread; beyond it a term has no effect."""
_SMALLEST_VARIANCE = 1e-12
"""Variance of a total relative to its parts; below this they cancel to within rounding."""


@dataclass(frozen=True)
class _Attempt:
    """Weights, the resulting shares, and the largest difference from the requested ones."""

    weights: Float32[Tensor, " R"]
    reached: Float32[Tensor, " R"]
    difference: float


def weights_for_shares(
    table: RewardTable, mode: Mode, shares: Mapping[str, float]
) -> Float32[Tensor, " R"]:
    """Find weights that give each term its requested share of the advantage.

    The weights w satisfy `advantage_shares(replace(table, weights=w), mode=mode)` = shares.

    With C_g the covariances of the terms inside group g, the shares are the gradient of

        1/2 mean_g(log(w' C_g w))

    with respect to log w. Weights for the requested shares b are therefore found at the minimum of
    this function minus b' log w. For one group this is the problem of risk budgeting, which has
    exactly one solution if C is positive definite. Groups with fewer images than terms may have
    solutions that are not a minimum; these are searched for by least squares. Every result is
    checked by scoring again. If groups have few images, or terms apply only to some prompts, the
    search may miss existing weights.
    Source: Spinu, An Algorithm for Computing Risk Parity Weights, 2013 (SSRN 2297383), for one
    group; the mean over groups is our extension.

    Args:
        table: Raw scores, finite where a term applies. The signs of its weights are kept, so that a
            term whose score should decrease stays negative; 0 counts as positive.
        mode: How terms are combined.
        shares: Requested share by term name, >= 0, with sum 1; terms that are not named have share
            0.

    Returns:
        One weight per term, in the order of the table; their absolute values add up to 1. Exactly 0
        for a share of 0. The same arguments give the same weights.

    Raises:
        ValueError: A share is requested for a term that is not in the table or is flat in every
            group; the shares are not as above; a prompt has no term with a share; or no weights
            were found that give these shares to within `SHARE_TOLERANCE` (the message names the
            nearest shares, the term and the reason).
    """
    _check_shares(table.names, shares)
    asked = torch.tensor([shares.get(name, 0.0) for name in table.names], dtype=torch.float64)
    signs = torch.where(table.weights < 0, -1.0, 1.0)
    parts = contributions(replace(table, weights=signs * (asked > 0)), mode=mode)
    _check_spread(table, asked, _varies(parts))
    attempts = []
    for sizes in _candidates(parts, asked):
        weights = signs * sizes.float()
        reached = advantage_shares(replace(table, weights=weights), mode=mode)
        attempts.append(_Attempt(weights, reached, (reached - asked).abs().max().item()))
        if attempts[-1].difference <= _GOOD_ENOUGH:
            break
    nearest = min(attempts, key=lambda attempt: attempt.difference)
    if nearest.difference > SHARE_TOLERANCE:
        raise _out_of_reach(table, asked, nearest, _varies(parts))
    return nearest.weights


def _check_shares(names: tuple[str, ...], shares: Mapping[str, float]) -> None:
    for name, share in shares.items():
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else f"use any of {', '.join(names)}"
            raise ValueError(f"share of {name}: no such term in the table; {remedy}")
        if not (math.isfinite(share) and share >= 0):
            raise ValueError(
                f"share {share} of {name}: must be a finite number of 0 or more; leave the term "
                "out for a share of 0"
            )
    total = math.fsum(shares.values())
    if abs(total - 1) > SUM_TOLERANCE:
        remedy = f"divide each by {total:g}" if total > 0 else "name at least one term"
        raise ValueError(f"shares [{_list(shares)}] add up to {total:.7g}, not to 1; {remedy}")


def _check_spread(
    table: RewardTable, asked: Float64[Tensor, " R"], varies: Bool[Tensor, "P R"]
) -> None:
    for column, name in enumerate(table.names):
        if asked[column] > 0 and not varies[:, column].any():
            raise ValueError(
                f"share {asked[column]:g} of {name}: the term applies to "
                f"{int(table.is_applicable[:, column].sum())} of {len(varies)} prompts and is flat "
                "in every group of these, so no weight gives it a share; leave it out, or measure "
                "on prompts for which it distinguishes the images"
            )


def _varies(parts: Float32[Tensor, "P G R"]) -> Bool[Tensor, "P R"]:
    """Where a term distinguishes images; False for terms with weight 0, or that do not apply."""
    return ~is_flat(parts)


def _candidates(
    parts: Float32[Tensor, "P G R"], asked: Float64[Tensor, " R"]
) -> Iterator[Float64[Tensor, " R"]]:
    """Absolute weights to try, the most promising first.

    Args:
        parts: Contributions of the terms at absolute weights of 1, and 0 for terms without a share.
            The factor that compensates for terms that do not apply scales a whole group, which does
            not change its shares.
        asked: Requested shares.
    """
    is_wanted = asked > 0
    centred = parts.double() - parts.double().mean(dim=1, keepdim=True)
    # A flat group has no shares; its rounding errors must not count as spread.
    centred = centred.masked_fill(~_varies(parts)[:, None, :], 0.0)[..., is_wanted]
    centred = centred[_varies(parts).any(dim=1)]
    spreads = centred.square().mean(dim=(0, 1)).sqrt()
    scaled = centred / spreads
    covariances = torch.einsum("pgr,pgs->prs", scaled, scaled) / parts.shape[1]
    for log_weights in _solve(covariances.numpy(), asked[is_wanted].numpy()):
        wanted_sizes = torch.from_numpy(np.exp(log_weights - log_weights.max())) / spreads
        sizes = torch.zeros_like(asked)
        sizes[is_wanted] = wanted_sizes / wanted_sizes.sum()
        yield sizes


def _solve(covariances: Array, asked: Array) -> Iterator[Array]:
    """Logarithms of weights: of the minimum, then by least squares from several starting points.

    Args:
        covariances: One matrix per group, for terms of unit spread.
        asked: Requested shares, all above 0.
    """

    def evaluate(log_weights: Array) -> tuple[float, Array]:
        # A common factor changes nothing, but could overflow.
        log_weights = log_weights - log_weights.max()
        weights = np.exp(log_weights)
        parts = weights * (covariances @ weights)
        apart = np.einsum("grr,r->g", covariances, weights**2)
        variance = np.maximum(parts.sum(axis=1), _SMALLEST_VARIANCE * apart)
        objective = 0.5 * np.log(variance).mean() - asked @ log_weights
        return float(objective), (parts / variance[:, None]).mean(axis=0) - asked

    # Exact for uncorrelated terms with the same spread in every group.
    first = (0.5 * np.log(asked)).clip(min=-_LOG_RANGE)
    limits = (-_LOG_RANGE, _LOG_RANGE)
    bounds = [limits] * len(asked)
    yield minimize(evaluate, first, jac=True, method="L-BFGS-B", bounds=bounds).x
    steps = np.random.default_rng(0).normal(size=(_STARTS - 1, len(asked)))
    for start in (first, *(first + steps)):
        # Must be strictly inside the bounds.
        inside = start.clip(0.99 * -_LOG_RANGE, 0.99 * _LOG_RANGE)
        yield least_squares(lambda values: evaluate(values)[1], inside, bounds=limits).x


def _out_of_reach(
    table: RewardTable,
    asked: Float64[Tensor, " R"],
    nearest: _Attempt,
    varies: Bool[Tensor, "P R"],
) -> ValueError:
    column = int((nearest.reached - asked).abs().argmax())
    asked_text, weights_text, reached_text = (
        _list(dict(zip(table.names, values.tolist(), strict=True)))
        for values in (asked, nearest.weights, nearest.reached)
    )
    reason = _explain(table, column, nearest.weights.sign(), varies)
    return ValueError(
        f"no weights were found that give the shares [{asked_text}]; the nearest, "
        f"[{weights_text}], give [{reached_text}]. Farthest off is {table.names[column]}, which "
        f"{reason}. Ask for shares nearer to those reached, or measure on more prompts with larger "
        "groups"
    )


def _explain(
    table: RewardTable, column: int, signs: Float32[Tensor, " R"], varies: Bool[Tensor, "P R"]
) -> str:
    """Explain why a term may not get its share: where it varies, and what pulls against it."""
    is_alone = varies[:, column] & (varies.sum(dim=1) == 1)
    reason = (
        f"varies in {int(varies[:, column].sum())} of the {int(varies.any(dim=1).sum())} groups "
        f"that are not flat, and is the only one to do so in {int(is_alone.sum())} of them"
    )
    # A sign of 0 excludes the terms without a share.
    pulls = correlations(table)[column].nan_to_num() * signs * signs[column]
    against = ", ".join(
        f"{name} (correlation {pull:.2f})"
        for name, pull in zip(table.names, pulls.tolist(), strict=True)
        if pull < CONFLICT_THRESHOLD
    )
    return f"{reason}, and is in conflict with {against}" if against else reason


def _list(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:.4g}" for name, value in values.items())
