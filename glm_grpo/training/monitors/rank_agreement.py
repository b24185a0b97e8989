"""Whether two decodes of the same tokens put the images of a group into the same order.

Only the order matters to what is learnt: an advantage compares an image with the others of its
prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Float64
from scipy.stats import rankdata
from torch import Tensor

from rewards.reweigh import Mode, combine, is_flat
from rewards.types import RewardTable


@dataclass(frozen=True)
class RankAgreement:
    """Rank correlations inside groups, averaged over the groups; -1..1.

    Attributes:
        terms: By name; NaN for a term that tells the images apart in no group, in neither decode.
        total: Of the weighed rewards; NaN likewise.
    """

    terms: Mapping[str, float]
    total: float


def compare_ranks(cheap: RewardTable, full: RewardTable, *, mode: Mode) -> RankAgreement:
    """Compares the scores of the same images in two decodes, term by term and in all.

    Args:
        cheap: Scores of one decode.
        full: Scores of the other: same prompts, images, terms and weights.
        mode: How the terms are combined.
    """
    terms = {}
    for column, name in enumerate(full.names):
        applies = full.is_applicable[:, column]
        scores = (table.raw[applies, :, column] for table in (cheap, full))
        terms[name] = _mean_over_groups(spearman_correlations(*scores))
    totals = spearman_correlations(combine(cheap, mode=mode), combine(full, mode=mode))
    return RankAgreement(terms=terms, total=_mean_over_groups(totals))


def spearman_correlations(
    first: Float32[Tensor, "P G"], second: Float32[Tensor, "P G"]
) -> Float64[Tensor, " P"]:
    """Spearman's rank correlation of each group: Pearson's of the ranks, ties by average rank.

    0 where one of the two is flat: it shows nothing of the order that the other sees. NaN where
    both are: there is no order to be seen.

    Source: Spearman, The proof and measurement of association between two things, American
    Journal of Psychology 15 (1904).

    Args:
        first: Finite.
        second: Finite, of the same images.
    """
    flat = torch.stack([is_flat(first), is_flat(second)])
    ranks, others = _centred_ranks(first), _centred_ranks(second)
    sizes = ranks.square().sum(dim=1) * others.square().sum(dim=1)
    # 0 / 0 in a flat group, which is filled below.
    correlations = (ranks * others).sum(dim=1) / sizes.sqrt()
    return correlations.masked_fill(flat.any(dim=0), 0.0).masked_fill(flat.all(dim=0), math.nan)


def _centred_ranks(scores: Float32[Tensor, "P G"]) -> Float64[Tensor, "P G"]:
    # torch has no ranks of ties.
    ranks = torch.from_numpy(rankdata(scores.numpy(), axis=1))
    return ranks - ranks.mean(dim=1, keepdim=True)


def _mean_over_groups(correlations: Float64[Tensor, " P"]) -> float:
    return correlations.nanmean().item()
