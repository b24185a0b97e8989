"""Paired bootstrap confidence interval of a mean difference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

RESAMPLES_AT_ONCE = 1_000
"""Bounds the memory of the resampling: this many rows of N indices."""


@dataclass(frozen=True)
class Interval:
    """A mean difference with its confidence interval.

    Attributes:
        mean_difference: Mean of after - before.
        low: Lower end.
        high: Upper end.
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

    The unit that is drawn again is the prompt: pairing removes how much harder one prompt is than
    another, and several images of one prompt belong averaged into one value, for they are not
    independent evidence.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), sections 8.3 and 13.3.

    Args:
        before: One score a prompt, finite.
        after: One score for the same prompts in the same order.
        confidence: Probability that the interval is to cover, in (0, 1).
        resamples: Number of resampled means, >= 1.
        seed: Of the resampling.

    Returns:
        The mean difference and its interval; a single prompt gives an interval of no width.

    Raises:
        ValueError: No prompts, a value that is not finite, or an argument out of range.
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
            f"{len(before)} scores before and {len(after)} after: pass one score a prompt, for "
            "the same prompts, at least one"
        )
    for name, scores in (("before", before), ("after", after)):
        for (row,) in (~torch.isfinite(scores)).nonzero().tolist():
            raise ValueError(f"{name}[{row}] is {scores[row].item()}: scores must be finite")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence}: must be between 0 and 1, for instance 0.95")
    if resamples < 1:
        raise ValueError(f"resamples {resamples}: must be 1 or more; 10000 is usual")
