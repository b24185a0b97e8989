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

from glm_grpo.data.prompts import part_of_batch
from glm_grpo.training.collect import CollectSettings
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.training.generate import decode_and_score
from glm_grpo.training.joining import join_tables
from glm_grpo.training.phase import Models, PhaseClock
from glm_grpo.types import Experience
from rewards.reweigh import Mode, combine, is_flat
from rewards.types import RewardTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankAgreement:
    """Rank correlations within groups, averaged over the groups; -1..1.

    Attributes:
        terms: Correlation by term; NaN for a term that is flat in every group in both decodes.
        total: Correlation of the weighted totals; NaN likewise.
    """

    terms: Mapping[str, float]
    total: float


def compare_ranks(cheap: RewardTable, full: RewardTable, *, mode: Mode) -> RankAgreement:
    """Compare the scores of the same images in two decodes, by term and in total.

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
    """Spearman's rank correlation of each group: Pearson's correlation of average ranks.

    0 if one of the two is flat, because it shows nothing of the other's order. NaN if both are
    flat, because there is no order.

    Source: Spearman, The proof and measurement of association between two things, American
    Journal of Psychology 15 (1904).

    Args:
        first: Finite scores.
        second: Finite scores of the same images.
    """
    flat = torch.stack([is_flat(first), is_flat(second)])
    ranks, others = _centred_ranks(first), _centred_ranks(second)
    sizes = ranks.square().sum(dim=1) * others.square().sum(dim=1)
    # 0 / 0 in a flat group; replaced below.
    correlations = (ranks * others).sum(dim=1) / sizes.sqrt()
    return correlations.masked_fill(flat.any(dim=0), 0.0).masked_fill(flat.all(dim=0), math.nan)


def _centred_ranks(scores: Float32[Tensor, "P G"]) -> Float64[Tensor, "P G"]:
    # torch has no ranks with ties.
    ranks = torch.from_numpy(rankdata(scores.numpy(), axis=1))
    return ranks - ranks.mean(dim=1, keepdim=True)


def _mean_over_groups(correlations: Float64[Tensor, " P"]) -> float:
    return correlations.nanmean().item()


@dataclass(frozen=True)
class RecheckSettings:
    """When to recheck the cheap decode, and what to warn of.

    Attributes:
        every: Training steps between rechecks, >= 1; the first is at step 1.
        groups: Prompts whose images are also decoded in full, >= 1, at most those of a step.
        min_rank_correlation: Correlation of the totals within groups below which to warn.
    """

    every: int
    groups: int
    min_rank_correlation: float


class Recheck:
    """Measures how well the cheap decode of rollouts ranks their images.

    Args:
        models: Models of the run, with the full decoder.
        collect: How experience is made, with the denoising steps of rollouts.
        settings: Plain values.
        processes: Processes that collect together.
    """

    def __init__(
        self,
        models: Models,
        collect: CollectSettings,
        settings: RecheckSettings,
        processes: Processes = ALONE,
    ) -> None:
        self._models = models
        self._collect = collect
        self._settings = settings
        self._processes = processes

    def compare(self, experience: Experience, step: int, clock: PhaseClock) -> dict[str, float]:
        """Recheck if it is due, and warn if the cheap decode ranks badly.

        Args:
            experience: Experience of this step and process.
            step: Training step, from 1.
            clock: Records the time as phase `recheck`.

        Returns:
            `decode/rank_correlation/<term>` and `.../total`, NaN if no group has an order; empty
            if no recheck is due, and for runs without cheap decoding.

        Raises:
            RewardError: A term failed; the message names term, prompt and image.
            PeerError: Another process failed.
        """
        if self._collect.decode_steps == self._models.decoder.steps:
            return {}
        if (step - 1) % self._settings.every != 0:
            return {}
        with clock.phase("recheck"):
            agreement = self._rank_agreement(experience)
        self._warn_of(agreement, step)
        correlations = {**agreement.terms, "total": agreement.total}
        return {f"decode/rank_correlation/{name}": each for name, each in correlations.items()}

    def _rank_agreement(self, experience: Experience) -> RankAgreement:
        """Rank agreement of the step's first groups, decoded by the process that sampled them."""
        batch, table = experience.prompts, experience.rewards
        counts = self._processes.gather(len(batch.prompts))
        groups = self._settings.groups - sum(counts[: self._processes.rank])
        groups = min(max(groups, 0), len(batch.prompts))
        own = []
        with self._processes.together():
            if groups > 0:
                token_ids = experience.rollout.token_ids[:groups]
                some = part_of_batch(batch, range(groups))
                _, full = decode_and_score(self._models, some, token_ids)
                applies = table.is_applicable[:groups]
                cheap = replace(
                    table,
                    raw=table.raw[:groups],
                    is_applicable=applies,
                    notes={},
                    parts={},
                    pieces={},
                )
                own.append((cheap, full))
        pairs = [pair for part in self._processes.gather(own) for pair in part]
        cheap, full = (join_tables(tables) for tables in zip(*pairs, strict=True))
        return compare_ranks(cheap, full, mode=self._collect.combine)

    def _warn_of(self, agreement: RankAgreement, step: int) -> None:
        # NaN, if no group has an order, is no evidence against the cheap decode.
        if not agreement.total < self._settings.min_rank_correlation:
            return
        if self._processes.is_main:
            logger.warning(
                "step %d: decode.rollout_steps=%d ranks the images of a group differently from "
                "decode.steps=%d: correlation %.3f, below decode.min_rank_correlation=%.3f. For "
                "the next run raise decode.rollout_steps: `glm-grpo probe` shows how well it ranks",
                step,
                self._collect.decode_steps,
                self._models.decoder.steps,
                agreement.total,
                self._settings.min_rank_correlation,
            )
