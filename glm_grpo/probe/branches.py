"""Part of the reward's variance that the preview decides: branches of the same previews."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from scipy.stats import bootstrap
from torch import Tensor

from glm_grpo.seeds import derive_seed
from glm_grpo.training.collect import decode_and_score
from glm_grpo.training.phase import Models, sampling_size
from glm_grpo.types import PromptBatch
from rewards.reweigh import Mode, combine
from rewards.types import RewardTable

_RESAMPLES = 2000
_COVERAGE = 0.95


@dataclass(frozen=True)
class PreviewShare:
    """What previews decide of one score.

    Attributes:
        share: Of the variance inside prompts, about 0..1; NaN where nothing varies.
        low: Of the interval of 95 %, by a bootstrap over prompts; NaN where there is one prompt.
        high: Likewise.
    """

    share: float
    low: float
    high: float


def score_branches(
    models: Models,
    batch: PromptBatch,
    token_ids: Int64[Tensor, "P G T"],
    first: RewardTable,
    *,
    branches: int,
) -> Float32[Tensor, "P G B R"]:
    """Scores of B images to each preview: the one sampled, and B - 1 with other targets.

    Args:
        batch: With a preview.
        token_ids: Sampled for it.
        first: Their scores.
        branches: B, >= 2.

    Raises:
        RewardError: A term failed.
        MemoryLimitError: Memory ran out; names phase, size and remedy.
    """
    num_preview = models.policy.tokens_per_image(
        batch.height, batch.width
    ) - models.policy.tokens_per_image(batch.height, batch.width, has_preview=False)
    scores = [first.raw]
    for number in range(1, branches):
        other = replace(batch, seed=derive_seed(batch.seed, "branch", number))
        with models.phase("rollout", sampling_size(batch, models.policy)):
            rollout = models.policy.sample(
                other, policy_step=0, first_tokens=token_ids[..., :num_preview]
            )
        scores.append(decode_and_score(models, batch, rollout.token_ids)[1].raw)
    return torch.stack(scores, dim=2)


def preview_shares(
    raw: Float32[Tensor, "P G B R"], table: RewardTable, mode: Mode
) -> tuple[tuple[PreviewShare, ...], PreviewShare]:
    """Of each term, and of the total.

    Args:
        raw: Scores of B images to each of G previews.
        table: Which terms apply to which prompts, and their weights.
        mode: How terms are combined; all images of a prompt are one group.
    """
    applies = table.is_applicable
    terms = tuple(
        preview_share(raw[applies[:, column], ..., column].double())
        for column in range(raw.shape[-1])
    )
    totals = combine(replace(table, raw=raw.flatten(1, 2)), mode=mode)
    return terms, preview_share(totals.unflatten(1, raw.shape[1:3]).double())


def preview_share(scores: Float64[Tensor, "P G B"]) -> PreviewShare:
    """Variance component of previews, relative to all variance inside prompts.

    With MSB and MSW the mean squares between and inside previews, averaged over prompts,

        share = b / (b + MSW),   b = (MSB - MSW) / B

    the intraclass correlation of one-way random effects. Chance can make it a little negative.
    Source: Shrout and Fleiss 1979, Psychological Bulletin 86(2), ICC(1, 1).
    """
    if len(scores) == 0:
        return PreviewShare(math.nan, math.nan, math.nan)
    num_branches = scores.shape[2]
    between = num_branches * scores.mean(dim=2).var(dim=1)
    inside = scores.var(dim=2).mean(dim=1)

    def share(between: np.ndarray, inside: np.ndarray, axis: int = -1) -> np.ndarray:
        whole, rest = between.mean(axis=axis), inside.mean(axis=axis)
        # Of resamples some may hold prompts alone in which nothing varies.
        with np.errstate(invalid="ignore"):
            return np.asarray((whole - rest) / (whole + (num_branches - 1) * rest))

    if not bool(between.sum() + inside.sum() > 0):
        return PreviewShare(math.nan, math.nan, math.nan)
    parts = (between.numpy(), inside.numpy())
    value = float(share(*parts))
    if len(scores) == 1:
        return PreviewShare(value, math.nan, math.nan)
    interval = bootstrap(
        parts,
        share,
        paired=True,
        n_resamples=_RESAMPLES,
        confidence_level=_COVERAGE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return PreviewShare(value, float(interval.low), float(interval.high))


def join_branches(parts: Sequence[Float32[Tensor, "P G B R"]]) -> Float32[Tensor, "N G B R"] | None:
    """Prompts after prompts; None where no branches were sampled."""
    return torch.cat(list(parts)) if parts else None
