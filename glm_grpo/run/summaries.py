"""Compare held-out scores before and after training, with paired bootstrap intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import numpy as np
import pandas
import pyarrow
import torch
from jaxtyping import Float32
from torch import Tensor

from glm_grpo.errors import GlmGrpoError, StorageError
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder, step_of
from glm_grpo.run.tables import RAW, SummaryRow, evaluation_steps, read_evaluation
from rewards.terms.ocr import OCR, OCR_EXACT

RESAMPLES_AT_ONCE = 1_000
"""Limits the memory of resampling to this many rows of N indices."""

_BOOTSTRAP_SEED = 0
_COLUMNS = ("step", "prompt_id", RAW, "total")

FEWEST_PROMPTS = 10
"""With fewer there is no interval: a bootstrap of a handful of differences is far too narrow."""


@dataclass(frozen=True)
class Interval:
    """A mean difference with its confidence interval.

    Attributes:
        mean_difference: Mean of after - before.
        low: Lower end of the interval; NaN with fewer than `FEWEST_PROMPTS`.
        high: Upper end of the interval; NaN likewise.
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
        before: One finite score per prompt.
        after: One score for the same prompts in the same order.
        confidence: Nominal coverage of the interval, in (0, 1).
        resamples: Number of resampled means, >= 1.

    Returns:
        The mean difference and its interval, which has width 0 for a single prompt.

    Raises:
        ValueError: There are no prompts, a value is not finite, or an argument is out of range.
    """
    _check_arguments(before, after, confidence=confidence, resamples=resamples)
    differences = (after.double() - before.double()).cpu().numpy()
    generator = np.random.default_rng(seed)
    means = []
    for start in range(0, resamples, RESAMPLES_AT_ONCE):
        rows = min(RESAMPLES_AT_ONCE, resamples - start)
        drawn = generator.integers(len(differences), size=(rows, len(differences)))
        means.append(differences[drawn].mean(axis=1))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(np.concatenate(means), [tail, 1.0 - tail])
    return Interval(mean_difference=float(differences.mean()), low=float(low), high=float(high))


def _check_arguments(
    before: Float32[Tensor, " N"],
    after: Float32[Tensor, " N"],
    *,
    confidence: float,
    resamples: int,
) -> None:
    if len(before) != len(after) or len(before) == 0:
        raise ValueError(
            f"{len(before)} scores before and {len(after)} after: pass one score per prompt, for "
            "the same prompts, at least one"
        )
    for name, scores in (("before", before), ("after", after)):
        for (row,) in (~torch.isfinite(scores)).nonzero().tolist():
            raise ValueError(f"{name}[{row}] is {scores[row].item()}: scores must be finite")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence}: must be between 0 and 1, for instance 0.95")
    if resamples < 1:
        raise ValueError(f"resamples {resamples}: must be 1 or more; 10000 is usual")


def gain_over_prompts(before: Float32[Tensor, " N"], after: Float32[Tensor, " N"]) -> Interval:
    """Mean difference over prompts with its 95 % interval, if there are enough prompts for one.

    Arguments as in `paired_bootstrap`.
    """
    gain = paired_bootstrap(before, after, seed=_BOOTSTRAP_SEED)
    if len(before) < FEWEST_PROMPTS:
        return replace(gain, low=math.nan, high=math.nan)
    return gain


def summarise(folder: RunFolder) -> list[SummaryRow]:
    """Summarise every term and the total before and after, with paired 95 % intervals over prompts.

    Uses the first and the last stored evaluation, so it also works for an interrupted run. A
    prompt's value is the mean over its samples; a term counts the prompts it applies to.
    With an OCR term, `OCR_EXACT` follows it. Empty if there are fewer than two evaluations.

    Raises:
        StorageError: An evaluation cannot be read, or the two have different terms.
    """
    summary = summarise_until(folder, None)
    return [] if summary is None else summary.rows


def untrained_means(folder: RunFolder) -> dict[str, float]:
    """Mean held-out scores of the untrained model, if the run began with another run's weights.

    Empty without a `first_run`.
    """
    first = first_run(folder)
    if first is None:
        return {}
    means: dict[str, float] = _stored_means(read_evaluation(first, 0, _COLUMNS)).mean().to_dict()
    return means


def first_run(folder: RunFolder) -> RunFolder | None:
    """Follow `model.start_from` back to the run that began with the untrained model.

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
    is_alike = (config.reward, config.eval, config.decode) == (own.reward, own.eval, own.decode)
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

    Args:
        last_step: Last step to consider; None: no limit.

    Returns:
        The summary; None if there are fewer than two evaluations.

    Raises:
        StorageError: As for `summarise`.
    """
    steps = [each for each in evaluation_steps(folder) if last_step is None or each <= last_step]
    if len(steps) < 2:
        return None
    ends = (read_evaluation(folder, step, _COLUMNS) for step in (steps[0], steps[-1]))
    before, after = map(_stored_means, ends)
    odd = sorted({*before.columns} ^ {*after.columns})
    if odd:
        raise StorageError(
            f"{folder.evaluation_path(steps[0])} and {folder.evaluation_path(steps[-1])} do not "
            f"have scores for the same terms ({', '.join(odd)} in one of them); restore the "
            "originals from a copy"
        )
    return Summary(_compare(before, after), step=steps[-1], prompts=len(before))


def _compare(before: pandas.DataFrame, after: pandas.DataFrame) -> list[SummaryRow]:
    rows = []
    for name in after.columns:
        pairs = pandas.concat([before[name], after[name]], axis=1).dropna().to_numpy(numpy.float32)
        if len(pairs) > 0:
            rows.append(_row(name, torch.from_numpy(pairs[:, 0]), torch.from_numpy(pairs[:, 1])))
    return rows


def _stored_means(table: pyarrow.Table) -> pandas.DataFrame:
    frame = table.to_pandas()
    names = [name for name in frame.columns if name.startswith(RAW)]
    scores = frame[[*names, "total"]].rename(columns=lambda name: name.removeprefix(RAW))
    return _prompt_means(scores, frame["prompt_id"])


def _prompt_means(scores: pandas.DataFrame, prompt_ids: pandas.Series) -> pandas.DataFrame:
    """Mean over each prompt's samples: a row per prompt, a column per term, the total last."""
    if OCR in scores:
        exact = (scores[OCR] == 1).astype(float).where(scores[OCR].notna())
        scores.insert(scores.columns.get_loc(OCR) + 1, OCR_EXACT, exact)
    return scores.groupby(prompt_ids, sort=False).mean()


def _row(name: str, before: Float32[Tensor, " N"], after: Float32[Tensor, " N"]) -> SummaryRow:
    interval = gain_over_prompts(before, after)
    return SummaryRow(
        name=name,
        before=before.mean().item(),
        after=after.mean().item(),
        difference=interval.mean_difference,
        low=interval.low,
        high=interval.high,
    )
