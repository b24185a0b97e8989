"""Compare cheaply decoded rollouts with their full decode."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float32, Float64
from scipy.stats import rankdata
from torch import Tensor

from glm_grpo.config import Config
from glm_grpo.data.prompts import part_of_batch
from glm_grpo.training.collate import join_tables
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.generate import decode_and_score
from glm_grpo.training.models import Models
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import Experience
from rewards.types import RewardTable
from rewards.weighting import Mode, combine, is_zero_std

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankAgreement:
    """Rank correlations within groups, averaged over the groups; -1..1.

    Attributes:
        terms: Correlation by term; NaN for one that scores each group equally in both decodes.
        total: Correlation of the weighted totals; NaN likewise.
    """

    terms: Mapping[str, float]
    total: float


def compare_ranks(cheap: RewardTable, full: RewardTable, *, mode: Mode) -> RankAgreement:
    """Compare the scores of the same images in two decodes, by term and in total.

    Args:
        cheap: Scores of one decode.
        full: Scores of the other: same prompts, images, terms and weights.
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
    """Spearman's rank correlation of each group: Pearson's correlation of average ranks.

    0 if one of the two is a zero-std group, which shows nothing of the other's order. NaN if both
    are, because there is no order, and for a group of which an image has no score (NaN).

    Source: Spearman, The proof and measurement of association between two things, American
    Journal of Psychology 15 (1904).

    Args:
        first: Scores.
        second: Scores of the same images.
    """
    zero_std = torch.stack([is_zero_std(first), is_zero_std(second)])
    ranks, others = _centred_ranks(first), _centred_ranks(second)
    sizes = ranks.square().sum(dim=1) * others.square().sum(dim=1)
    is_undefined = zero_std.all(dim=0) | (first + second).isnan().any(dim=1)
    # 0 / 0 in a zero-std group; replaced below.
    correlations = (ranks * others).sum(dim=1) / sizes.sqrt()
    return correlations.masked_fill(zero_std.any(dim=0), 0.0).masked_fill(is_undefined, math.nan)


def _centred_ranks(scores: Float32[Tensor, "P G"]) -> Float64[Tensor, "P G"]:
    # torch has no ranks with ties.
    ranks = torch.from_numpy(rankdata(scores.numpy(), axis=1))
    return ranks - ranks.mean(dim=1, keepdim=True)


def _mean_over_groups(correlations: Float64[Tensor, " P"]) -> float:
    return correlations.nanmean().item()


def recheck_decode(
    models: Models,
    experience: Experience,
    step: int,
    config: Config,
    clock: PhaseClock,
    processes: Processes,
) -> dict[str, float]:
    """Compare the cheap decode of a step with the full one if it is due; warn if it ranks badly.

    Args:
        models: Models of the run, with the full decoder.
        config: `decode.recheck_every` and the keys beside it say when to compare and to warn.
        clock: Records the time as phase `recheck`.

    Returns:
        `decode/rank_correlation/<term>` and `.../total`, NaN if no group has an order; empty if no
        recheck is due, and for runs without cheap decoding.

    Raises:
        PeerError: Another process failed.
    """
    decode = config.decode
    if decode.training_steps == decode.steps or (step - 1) % decode.recheck_every != 0:
        return {}
    with clock.phase("recheck"):
        agreement = _rank_agreement(models, experience, config, processes)
    # NaN, if no group has an order, is no evidence against the cheap decode.
    if processes.is_main and agreement.total < decode.min_rank_correlation:
        logger.warning(
            "step %d: decode.rollout_steps=%d ranks the images of a group differently from "
            "decode.steps=%d: correlation %.3f, below decode.min_rank_correlation=%.3f. For the "
            "next run raise decode.rollout_steps: `glm-grpo probe` shows how well it ranks",
            step,
            decode.training_steps,
            decode.steps,
            agreement.total,
            decode.min_rank_correlation,
        )
    correlations = {**agreement.terms, "total": agreement.total}
    return {f"decode/rank_correlation/{name}": each for name, each in correlations.items()}


def _rank_agreement(
    models: Models, experience: Experience, config: Config, processes: Processes
) -> RankAgreement:
    """Rank agreement of the step's first groups, decoded by the process that sampled them."""
    batch, table = experience.prompts, experience.scores
    counts = processes.gather(len(batch.prompts))
    groups = config.decode.recheck_groups - sum(counts[: processes.rank])
    groups = min(max(groups, 0), len(batch.prompts))
    own = []
    with processes.together():
        if groups > 0:
            token_ids = experience.rollout.token_ids[:groups]
            some = part_of_batch(batch, range(groups))
            _, full = decode_and_score(models, some, token_ids)
            cheap = replace(
                table.without_places(),
                raw=table.raw[:groups],
                is_applicable=table.is_applicable[:groups],
                notes={},
                objects={},
            )
            own.append((cheap, full))
    pairs = [pair for part in processes.gather(own) for pair in part]
    cheap, full = (join_tables(tables) for tables in zip(*pairs, strict=True))
    return compare_ranks(cheap, full, mode=config.reward.combine)
