"""Split the rows of a step into minibatches and micro-batches, equally many in every process."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from glm_grpo.grpo.strategy import Strategy
from glm_grpo.types import Experience, TargetTokens


@dataclass(frozen=True)
class MicroBatch:
    """Rows to replay at once.

    All processes must call the model equally often. One with fewer micro-batches than another adds
    stand-ins: row 0, with fractions of 0.

    Attributes:
        rows: Rows to replay.
        fraction: Fraction of the minibatch's rows, over all processes.
        replayed_fraction: Fraction of the rows that are replayed; equals `fraction` if none is
            skipped.
    """

    rows: Int64[Tensor, " N"]
    fraction: float
    replayed_fraction: float


def split_experience(
    experience: Experience,
    strategy: Strategy,
    *,
    minibatches: int,
    micro_batch_size: int,
    skips_zero_std: bool,
) -> list[list[MicroBatch]]:
    """Micro-batches of each minibatch; rows index the flattened P * G axis.

    Args:
        minibatches: Number of minibatches, >= 1. Each has every k-th prompt of the batch, counted
            over all processes, so that every process has part of each.
        micro_batch_size: Largest number of rows to replay at once, >= 1.
        skips_zero_std: Whether to skip sequences with advantage 0.
    """
    trained = experience.trained_groups()
    group_size = experience.totals.shape[1]
    rows = trained[:, None] * group_size + torch.arange(group_size)
    return [
        _split_sequences(
            rows[own].flatten(), experience, strategy, micro_batch_size, skips_zero_std
        )
        for own in _split_prompts(torch.arange(len(trained)), len(trained), minibatches, strategy)
    ]


def split_targets(
    targets: TargetTokens,
    strategy: Strategy,
    *,
    num_prompts: int,
    minibatches: int,
    micro_batch_size: int,
) -> list[list[MicroBatch]]:
    """Micro-batches of each minibatch; rows index the prompts of `targets`.

    Args:
        num_prompts: Number of prompts in this process's batch, with or without a target image.
        minibatches: As in `split_experience`; `micro_batch_size` too.
    """
    found = []
    for own in _split_prompts(targets.prompt_indices, num_prompts, minibatches, strategy):
        counts = strategy.gather(len(own))
        groups = _equally_many(own, max(counts), micro_batch_size)
        fractions = [count / sum(counts) for _, count in groups]
        found.append(
            [
                MicroBatch(rows, fraction, replayed_fraction=fraction)
                for (rows, _), fraction in zip(groups, fractions, strict=True)
            ]
        )
    return found


def _split_prompts(
    places: Int64[Tensor, " B"], num_prompts: int, minibatches: int, strategy: Strategy
) -> list[Int64[Tensor, " N"]]:
    """For each minibatch, which of the prompts at these places of the process's batch it has."""
    before = sum(strategy.gather(num_prompts)[: strategy.rank])
    minibatch = (places + before) % minibatches
    return [(minibatch == index).nonzero().flatten() for index in range(minibatches)]


def _split_sequences(
    rows: Int64[Tensor, " N"],
    experience: Experience,
    strategy: Strategy,
    size: int,
    skips_zero_std: bool,
) -> list[MicroBatch]:
    replayed = rows
    if skips_zero_std:
        replayed = rows[experience.is_learned_from().flatten()[rows]]
    counts, replayed_counts = (strategy.gather(len(each)) for each in (rows, replayed))
    if not any(replayed_counts):
        # No advantage differs from 0: one pass for the metrics, with a gradient of zero.
        replayed = rows[:size]
        replayed_counts = [min(count, size) for count in counts]
    return [
        MicroBatch(group, count / sum(counts), replayed_fraction=count / sum(replayed_counts))
        for group, count in _equally_many(replayed, max(replayed_counts), size)
    ]


def _equally_many(
    rows: Int64[Tensor, " N"], most: int, size: int
) -> list[tuple[Int64[Tensor, " M"], int]]:
    """Groups of at most `size` rows, and how many of them count.

    Args:
        most: Largest number of rows in any process, which decides the number of groups.
    """
    groups = [(group, len(group)) for group in rows.split(size) if len(group)]
    stand_in = (torch.zeros(1, dtype=torch.long), 0)
    return groups + [stand_in] * (math.ceil(most / size) - len(groups))
