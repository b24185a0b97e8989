"""Compare held-out scores before and after training, with paired bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas
import torch
from jaxtyping import Float32
from scipy.stats import bootstrap
from torch import Tensor

from glm_grpo.errors import GlmGrpoError
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder, step_of
from glm_grpo.run.tables import NOTE, RAW, SummaryRow, evaluation_steps, read_evaluation
from rewards.exact import EXACT

_RESAMPLES_AT_ONCE = 1_000
"""Limits the memory of resampling to this many rows of N indices."""
_BOOTSTRAP_SEED = 0

FEWEST_PROMPTS = 10
"""With fewer there is no interval: a bootstrap of a handful of differences is far too narrow."""


Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean difference with its confidence interval.

    Attributes:
        mean_difference: Mean of after - before.
        low: NaN with fewer than `FEWEST_PROMPTS`, as `high`.
    """

    mean_difference: float
    low: float
    high: float


def paired_bootstrap(
    before: Float32[Tensor, " N"],
    after: Float32[Tensor, " N"],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int,
) -> Interval:
    """Percentile bootstrap interval of the mean difference, resampling prompts in pairs.

    The resampling unit is the prompt. Pairing removes differences in difficulty between prompts.
    Average several images of one prompt into one value first, because they are not independent
    evidence.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), sections 8.3 and 13.3.

    Args:
        before: One score per prompt, at least two.
        after: One score for the same prompts in the same order.
        confidence: Nominal coverage of the interval, in (0, 1).
        resamples: Number of resampled means.
    """
    differences = (after.double() - before.double()).cpu().numpy()
    low, high = _bootstrap([differences], confidence=confidence, resamples=resamples, seed=seed)
    return Interval(float(differences.mean()), low=float(low), high=float(high))


def mean_of_groups(groups: Sequence[Float64Array]) -> tuple[Float64Array, ...]:
    """Mean over groups of the mean over their prompts, with the ends of its 95 % interval.

    The bootstrap of `paired_bootstrap`, with as many prompts from each group as it has, because the
    groups of a benchmark are fixed. Rows are resampled together, so differences of rows are paired.

    Args:
        groups: For each group a row per figure and a column per prompt, at least one.

    Returns:
        Means, lower and upper ends, one per figure; ends are NaN if a group has fewer than
        `FEWEST_PROMPTS`.
    """
    means = _mean_of_means(*groups)
    if min(group.shape[-1] for group in groups) < FEWEST_PROMPTS:
        return means, np.full_like(means, np.nan), np.full_like(means, np.nan)
    return means, *_bootstrap(groups, confidence=0.95, resamples=10_000, seed=_BOOTSTRAP_SEED)


def _bootstrap(
    groups: Sequence[Float64Array], *, confidence: float, resamples: int, seed: int
) -> tuple[Float64Array, Float64Array]:
    """Ends of the percentile bootstrap interval, resampling the columns of each group."""
    found = bootstrap(
        groups,
        _mean_of_means,
        n_resamples=resamples,
        batch=_RESAMPLES_AT_ONCE,
        vectorized=True,
        axis=-1,
        confidence_level=confidence,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return found.low, found.high


def _mean_of_means(*groups: Float64Array, axis: int = -1) -> Float64Array:
    means: Float64Array = np.mean([group.mean(axis=axis) for group in groups], axis=0)
    return means


def gain_over_prompts(before: Float32[Tensor, " N"], after: Float32[Tensor, " N"]) -> Interval:
    """Mean difference over prompts with its 95 % interval, if there are enough prompts for one.

    Arguments as in `paired_bootstrap`; prompts without a score before or after (NaN) are left out.
    """
    is_scored = ~(before.isnan() | after.isnan())
    before, after = before[is_scored], after[is_scored]
    if len(before) < FEWEST_PROMPTS:
        mean = (after.double() - before.double()).mean().item()
        return Interval(mean, low=math.nan, high=math.nan)
    return paired_bootstrap(before, after, seed=_BOOTSTRAP_SEED)


def summarise(folder: RunFolder) -> list[SummaryRow]:
    """Summarise every term and the total before and after, with paired 95 % intervals over prompts.

    Uses the first and the last stored evaluation, so it also works for an interrupted run. A
    prompt's value is the mean over its samples; a term counts the prompts it applies to.
    The share of right images follows its term, see `EXACT`. Empty if there are fewer than two
    evaluations.
    """
    summary = summarise_until(folder, None)
    return [] if summary is None else summary.rows


def base_means(folder: RunFolder) -> dict[str, float]:
    """Mean held-out scores of the base model, if the run began with another run's weights.

    Empty without a `first_run`.
    """
    first = first_run(folder)
    if first is None:
        return {}
    means: dict[str, float] = _prompt_means(first, 0).mean().to_dict()
    return means


def first_run(folder: RunFolder) -> RunFolder | None:
    """Follow `model.start_from` back to the run that began with the base model.

    None if the run began with no other one, or if that one is gone or evaluated differently (other
    prompts, samples, decoding or reward). Also None unless totals are weighted sums: others are
    scaled by each run's own first evaluation.
    """
    try:
        return _first_run(folder)
    except GlmGrpoError:
        return None


def _first_run(folder: RunFolder) -> RunFolder | None:
    config = own = read_config(folder)
    first = folder
    while config.model.start_from is not None:
        start = Path(config.model.start_from)
        first = RunFolder(start if step_of(start) is None else start.parent.parent)
        config = read_config(first)
    theirs, ours = (
        (each.reward, each.eval.model_copy(update={"group_by": None}), each.decode)
        for each in (config, own)
    )
    is_alike = theirs == ours
    if first is folder or not is_alike or own.reward.combine != "weighted_sum":
        return None
    ours, theirs = (read_evaluation(each, 0, ("prompt_id",)) for each in (folder, first))
    return first if ours.equals(theirs) else None


@dataclass(frozen=True)
class Summary:
    """Comparison of two evaluations.

    Attributes:
        rows: Terms in the order of the R axis, the total last.
        step: Step of the later evaluation.
        prompts: Number of held-out prompts.
    """

    rows: list[SummaryRow]
    step: int
    prompts: int


def summarise_until(folder: RunFolder, last_step: int | None) -> Summary | None:
    """Like `summarise`, comparing the first evaluation with the last one up to a step.

    Returns:
        The summary; None if there are fewer than two evaluations.
    """
    steps = [each for each in evaluation_steps(folder) if last_step is None or each <= last_step]
    if len(steps) < 2:
        return None
    before, after = (_prompt_means(folder, step) for step in (steps[0], steps[-1]))
    rows = []
    for name in after.columns:
        pairs = pandas.concat([before[name], after[name]], axis=1).dropna().to_numpy(np.float32)
        if len(pairs) == 0:
            continue
        first, last = torch.from_numpy(pairs).unbind(dim=1)
        gain = gain_over_prompts(first, last)
        means = first.mean().item(), last.mean().item()
        rows.append(SummaryRow(name, *means, gain.mean_difference, gain.low, gain.high))
    return Summary(rows, step=steps[-1], prompts=len(before))


def _prompt_means(folder: RunFolder, step: int) -> pandas.DataFrame:
    """Mean over each prompt's samples: a row per prompt, a column per term, the total last."""
    return image_scores(folder, step).groupby("prompt_id", sort=False).mean()


def image_scores(folder: RunFolder, step: int) -> pandas.DataFrame:
    """Scores of an evaluation: a row per image by prompt id, a column per term, the total last.

    The share of right images follows its term, see `EXACT`. NaN where a term does not apply, or
    refused the image.
    """
    frame = read_evaluation(folder, step, ("prompt_id", RAW, NOTE, "total")).to_pandas()
    names = [name for name in frame.columns if name.startswith(RAW)]
    scores = frame[[*names, "total"]].rename(columns=lambda name: name.removeprefix(RAW))
    for name, exact in EXACT.items():
        if name in scores:
            notes = frame.get(f"{NOTE}{name}", [None] * len(frame))
            right = [
                exact.value_of(score, note if isinstance(note, str) else None)
                for score, note in zip(scores[name], notes, strict=True)
            ]
            scores.insert(scores.columns.get_loc(name) + 1, exact.name, right)
    return scores.set_index(frame["prompt_id"])
