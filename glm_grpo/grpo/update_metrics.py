"""Metrics of an update: means over the tokens of all micro-batches and processes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_grpo.errors import ConfigError
from glm_grpo.grpo.losses import effective_sample_size
from glm_grpo.grpo.strategy import Strategy

_SHOWN_BY_STAGE = ("policy/entropy", "ratio/clip_fraction", "kl/reference_tokens")
"""Metrics of tokens that are also reported for preview and target."""

_RATIOS = {"ratio/mean": "ratio/mean_square", "mismatch/ratio": "mismatch/ratio_square"}
"""Ratios, and the squares that together give their effective sample size."""


@dataclass(frozen=True)
class LossTerm:
    """A term of the loss of a minibatch, or a micro-batch's part of it.

    Attributes:
        loss: Its value over all processes; 0 for the SFT term of no target images.
        means: Metrics over the tokens of all processes; NaN if there are none. Parts of means are
            weighted, so that they add up.
    """

    loss: float
    means: Mapping[str, float]


def weighted(metrics: Mapping[str, Tensor], fraction: float) -> dict[str, float]:
    """Means, weighted by a fraction of all tokens."""
    means = [value.double().mean() for value in metrics.values()]
    # One transfer from the device. A custom loss may have its own metrics in CPU memory.
    device = means[-1].device
    values = torch.stack([mean.to(device) for mean in means]).tolist()
    return {name: fraction * value for name, value in zip(metrics, values, strict=True)}


def refuse_other_metrics(metrics: Mapping[str, float], names: Collection[str]) -> None:
    """Refuse varying metrics of a custom loss: a mean over the step needs them in every call."""
    for name in sorted({*metrics} ^ {*names}):
        raise ConfigError(
            f"loss.function: metric {name!r} was not reported by every call of a step; report the "
            "same metrics each time, with torch.nan where one has no value (the step's mean is "
            "then NaN)"
        )


def by_stage(metrics: Mapping[str, Tensor], num_preview: int) -> dict[str, Tensor]:
    """Split token metrics into preview and target, for images that have both."""
    found = {}
    for name in _SHOWN_BY_STAGE:
        tokens = metrics.get(name)
        # A custom loss may report a scalar under this name.
        if tokens is not None and tokens.ndim == 2 and 0 < num_preview < tokens.shape[1]:
            found[f"{name.removesuffix('_tokens')}/preview"] = tokens[:, :num_preview]
            found[f"{name.removesuffix('_tokens')}/target"] = tokens[:, num_preview:]
    return found


def join_parts(parts: Sequence[LossTerm], names: Sequence[str], strategy: Strategy) -> LossTerm:
    """The term over the sequences of all processes, from its parts in micro-batches."""
    own = torch.tensor(
        [[part.loss, *(part.means[name] for name in names)] for part in parts], dtype=torch.float64
    ).reshape(len(parts), 1 + len(names))
    everyone = torch.tensor(strategy.gather(own.sum(dim=0).tolist()), dtype=torch.float64)
    loss, *values = everyone.sum(dim=0).tolist()
    means = dict(zip(names, values, strict=True))
    means.pop("kl/reference_tokens", None)
    for ratio, square in _RATIOS.items():
        mean_square = means.pop(square, None)
        if mean_square is not None:
            size = effective_sample_size(means[ratio], mean_square)
            means[f"{ratio.split('/')[0]}/effective_sample_size"] = size
    log_ratio = means.pop("ratio/sequence_log", None)
    if log_ratio is not None:
        variance = means.pop("ratio/sequence_log_square") - log_ratio**2
        means["ratio/sequence_std"] = math.sqrt(max(0.0, variance))
    return LossTerm(loss, means)
