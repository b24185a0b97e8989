"""Audit the terms of a reward, individually and together, from a table of raw scores.

Within a group means among the G images of one prompt, which is all that an advantage compares.
Prompts to which a term does not apply, and images that it refused, are excluded from all values of
that term; NaN stands for undefined values, such as the mean of a term that applies to no prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from rewards.group_statistics import centre, group_means, group_variances
from rewards.types import RewardTable
from rewards.weighting import ZERO_STD_TOLERANCE, Mode, advantage_shares, combine, is_zero_std


@dataclass(frozen=True)
class TermAudit:
    """Audit of one term, in units of its raw score unless stated otherwise.

    Attributes:
        std: Population std over all images.
        std_within: Root of the mean over groups of the population variance within a group: the part
            of `std` that training sees.
        zero_std_fraction: Fraction of groups whose images all have the same score, see
            `weighting.is_zero_std`; 0..1.
        advantage_share: See `weighting.advantage_shares`; the shares of all terms add up to 1.
        distinct: Mean number of distinct scores in a group, 1..G.
        all_worst: Fraction of groups whose images all have the lowest score of all images; 0..1.
        all_best: Fraction of groups whose images all have the highest; 0..1.
    """

    name: str
    mean: float
    std: float
    std_within: float
    zero_std_fraction: float
    advantage_share: float
    headroom: float
    saturation: float
    distinct: float
    all_worst: float
    all_best: float


@dataclass(frozen=True)
class RewardAudit:
    """Audit of the terms of a reward.

    Attributes:
        terms: In the order of the table.
        correlations: See `correlations`.
    """

    terms: tuple[TermAudit, ...]
    correlations: Float64[Tensor, "R R"]


def audit_table(table: RewardTable, *, mode: Mode) -> RewardAudit:
    """Audit the terms of a reward from raw scores and weights; `mode` affects only shares."""
    shares = advantage_shares(table, mode=mode).tolist()
    terms = [
        _audit_term(name, table.raw[table.is_applicable[:, column], :, column], share)
        for column, (name, share) in enumerate(zip(table.names, shares, strict=True))
    ]
    return RewardAudit(tuple(terms), correlations(table))


def audit_total(table: RewardTable, *, mode: Mode) -> TermAudit:
    """Audit the totals, which are relative to their group under `normalize_then_sum`."""
    share = advantage_shares(table, mode=mode).sum().item()
    return _audit_term("total", combine(table, mode=mode), share)


def _audit_term(name: str, scores: Float32[Tensor, "P G"], share: float) -> TermAudit:
    exact = scores.double()
    zero_std, levels = is_zero_std(scores), group_means(exact)[:, 0]
    every = exact[~exact.isnan()]
    # Of no images, both are NaN, which no group's level is near.
    worst, best = (every.min(), every.max()) if len(every) else (math.nan, math.nan)
    tolerance = ZERO_STD_TOLERANCE * every.abs().amax() if len(every) else 0.0
    return TermAudit(
        name=name,
        mean=exact.nanmean().item(),
        std=(exact - exact.nanmean()).square().nanmean().sqrt().item(),
        std_within=group_means(centre(exact).square()).nanmean().sqrt().item(),
        zero_std_fraction=is_zero_std(scores).double().mean().item(),
        advantage_share=share,
        headroom=headroom(scores),
        saturation=saturation(scores),
        distinct=distinct_scores(scores),
        all_worst=(zero_std & (levels <= worst + tolerance)).double().mean().item(),
        all_best=(zero_std & (levels >= best - tolerance)).double().mean().item(),
    )


def correlations(table: RewardTable) -> Float64[Tensor, "R R"]:
    """Pearson correlation of each pair of terms within groups.

    Scores are centred within their group and pooled over the groups to which both terms apply, so
    that a group's weight depends on the variation of its scores. Differences between prompts, such
    as prompts on which both terms score high, do not count, because no advantage compares them.
    Images that a term refused are left out for all.

    Returns:
        Symmetric, -1..1; NaN if a term has equal scores in every group to which both apply.
    """
    is_missing = table.is_refused().any(dim=-1, keepdim=True)
    scores = table.raw.masked_fill(is_missing, math.nan)
    centred = _fill_unvaried(centre(scores.double()), scores, table).masked_fill(is_missing, 0.0)
    covariance = torch.einsum("pgr,pgs->rs", centred, centred)
    # [r, s]: variance of term r, over the groups to which s applies as well.
    variance = centred.square().sum(dim=1).T @ table.is_applicable.double()
    # For a term without variance, 0 / 0 gives the documented NaN.
    return (covariance / (variance * variance.T).sqrt()).clamp(-1.0, 1.0)


def headroom(scores: Float32[Tensor, "P G"]) -> float:
    """Mean over prompts of the best of G minus the mean: the gain from picking the best image.

    Near 0 there is nothing to reinforce: the policy generates no images better than its average.
    """
    exact = scores.double()
    best = exact.masked_fill(exact.isnan(), -math.inf).amax(dim=1, keepdim=True)
    return (best - group_means(exact)).nanmean().item()


def saturation(scores: Float32[Tensor, "P G"]) -> float:
    """Fraction of a group's other images that score as high as its best one, averaged over groups.

    0 if every group has a single best image, 1 if all are zero-std groups, NaN for single images.
    It grows when a term has reached its ceiling, without the need to know that ceiling: the best
    possible score is 1 for some terms and unknown or infinite for others. A term stuck at its floor
    is tied in the same way; its mean distinguishes the two cases. Differences within
    `weighting.ZERO_STD_TOLERANCE` count as equal.
    """
    is_missing = scores.isnan()
    best = scores.masked_fill(is_missing, -math.inf).amax(dim=1, keepdim=True)
    tolerance = ZERO_STD_TOLERANCE * scores.abs().masked_fill(is_missing, 0.0).amax(
        dim=1, keepdim=True
    )
    tied = (scores >= best - tolerance).sum(dim=1) - 1
    others = (~is_missing).sum(dim=1) - 1
    # For an image without others, 0 / 0 gives the documented NaN.
    return (tied.double() / others).masked_fill(others < 1, math.nan).nanmean().item()


def distinct_scores(scores: Float32[Tensor, "P G"]) -> float:
    """Mean over groups of the number of distinct scores, 1..G; NaN without groups.

    Neighbours within `weighting.ZERO_STD_TOLERANCE` count as equal; groups without scores are left
    out.
    """
    is_missing = scores.isnan()
    highest = scores.masked_fill(is_missing, -math.inf).amax(dim=1, keepdim=True)
    tolerance = ZERO_STD_TOLERANCE * scores.abs().masked_fill(is_missing, 0.0).amax(dim=1)
    # A missing score adds no distinct one.
    steps = scores.where(~is_missing, highest).sort(dim=1).values.diff(dim=1)
    counts = 1 + (steps > tolerance[:, None]).sum(dim=1)
    return counts.double()[~is_missing.all(dim=1)].mean().item()


def noise_fractions(decoded: Float32[Tensor, "P K R"], table: RewardTable) -> Float64[Tensor, " R"]:
    """Variance of the same tokens, decoded and scored again, relative to that within a group.

        fraction = mean_P(var_K(decoded)) / mean_P(var_G(raw))

    with sample variances (divided by K - 1 and G - 1, unbiased for any K and G) and means over the
    prompts to which the term applies. It estimates a fraction but is the quotient of two estimates,
    so it can exceed 1; it is not clipped, because that would hide how noisy it is. What a term
    adds by chance is noise of the advantages. What the decoder's noise adds is not, because a group
    shares one; a high fraction then means that the noise decides which image the term prefers.

    Args:
        decoded: Raw scores of the same tokens per prompt, decoded with K >= 2 seeds, and scored
            each time.
        table: Raw scores of the ordinary groups of the same prompts and terms, G >= 2.

    Returns:
        Fractions >= 0; NaN if a term applies to no prompt or has equal scores in every group.
    """
    sums = [
        _fill_unvaried(group_variances(scores.double()), scores, table).sum(dim=(0, 1))
        for scores in (decoded, table.raw)
    ]
    # Not infinite: without any variance, the fraction is undefined.
    return sums[0] / sums[1].masked_fill(sums[1] == 0, math.nan)


def _fill_unvaried(
    values: Float64[Tensor, "P N R"], scores: Float32[Tensor, "P G R"], table: RewardTable
) -> Float64[Tensor, "P N R"]:
    """Exactly 0 where a term does not apply, and in zero-std groups, which differ by rounding."""
    is_left_out = is_zero_std(scores) | ~table.is_applicable
    return values.masked_fill(is_left_out[:, None, :], 0.0)
