"""Generate and score the images of a batch: encode sources, sample, decode, score."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Int64
from torch import Tensor

from glm_grpo.data.prompts import part_of_batch
from glm_grpo.models.sampling import prompts_at_once
from glm_grpo.training.collate import join_rollouts
from glm_grpo.training.models import Models
from glm_grpo.training.out_of_memory import describe_decoding, describe_sampling
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import ImageBatch, ProgressCallback, PromptBatch, Rollout
from rewards.score import Scoring
from rewards.score_map import Grid
from rewards.types import RewardTable


def encode_sources(
    models: Models,
    batch: PromptBatch,
    clock: PhaseClock | None = None,
    *,
    is_evaluation: bool = False,
) -> PromptBatch:
    """Encode the source images of a batch as tokens; a batch without any is returned unchanged.

    Raises:
        MemoryLimitError: Memory ran out; the message names phase, size and remedy.
    """
    if batch.num_sources == 0:
        return batch
    work = f"one source image of {batch.height} x {batch.width} pixels at a time"
    with models.phase("sources", work, clock, is_evaluation=is_evaluation):
        return models.policy.encode_sources(batch)


def sample(
    models: Models,
    batch: PromptBatch,
    *,
    batch_size: int | None = None,
    clock: PhaseClock | None = None,
    is_evaluation: bool = False,
) -> Rollout:
    """Sample G token grids for each prompt.

    Args:
        batch_size: Images to sample at once, in whole groups; None: all.

    Raises:
        NonFiniteError: A log-probability is not finite.
        MemoryLimitError: Memory ran out; the message names phase, size and remedy.
    """
    clock = clock or PhaseClock()
    num_prompts = len(batch.prompts)
    at_once = prompts_at_once(num_prompts, batch.group_size, batch_size)
    parts = [batch]
    if at_once < num_prompts:
        rows = range(num_prompts)
        starts = rows[::at_once]
        parts = [part_of_batch(batch, rows[start : start + at_once]) for start in starts]
    work = describe_sampling(parts[0], models.policy)
    with models.phase("rollout", work, clock, is_evaluation=is_evaluation):
        rollouts = [
            models.policy.sample(
                part,
                phase="evaluation" if is_evaluation else "rollout",
                on_progress=partial(_report_in_part, clock.count, number, len(parts)),
            )
            for number, part in enumerate(parts)
        ]
    return join_rollouts(rollouts)


def _report_in_part(
    on_progress: ProgressCallback, number: int, parts: int, done: int, total: int
) -> None:
    """Report the tokens of one part as those of all, which are equally many."""
    on_progress(number * total + done, parts * total)


@dataclass(frozen=True)
class Decoded:
    """Decoded images of a batch, which terms may be scoring already."""

    images: ImageBatch
    scoring: Scoring


@contextmanager
def decode(
    models: Models,
    batch: PromptBatch,
    token_ids: Int64[Tensor, "P G T"],
    clock: PhaseClock,
    *,
    is_evaluation: bool = False,
    grid: Grid | None = None,
) -> Iterator[Decoded]:
    """Decode prompt by prompt; groups are scored while later ones decode, if the terms allow it.

    Scores that nobody waits for before the end are cancelled, such as those of a step that fails.

    Args:
        is_evaluation: Selects the terms that score, and the remedies when memory runs out.
        grid: Places for which the table says what they earned; None: none.

    Raises:
        MemoryLimitError: Memory ran out; the message names phase, size and remedy.
    """
    is_resident = not models.offload.moves("rewards")
    groups, work = [], describe_decoding(batch)
    with models.scorer.begin(
        batch.prompts, is_resident=is_resident, is_training=not is_evaluation, grid=grid
    ) as scoring:
        with models.phase("decode", work, clock, is_evaluation=is_evaluation):
            for group in models.decoder.decode_groups(batch, token_ids):
                groups.append(group)
                clock.count(len(groups), len(batch.prompts))
                if models.scorer.is_overlapping:
                    scoring.add(group)
        images = ImageBatch(pixels=torch.stack(groups), decode_seeds=batch.decode_seeds)
        yield Decoded(images, scoring)


def wait_for_scores(
    models: Models,
    batch: PromptBatch,
    decoded: Decoded,
    clock: PhaseClock,
    *,
    is_evaluation: bool = False,
) -> RewardTable:
    """Scores of decoded images; the phase `reward` is the time that the step waits for them.

    Terms whose networks wait in CPU memory during decoding start now.

    Args:
        is_evaluation: Whether to give the remedies for evaluations when memory runs out.

    Raises:
        MemoryLimitError: Memory ran out; the message names phase, size and remedy.
    """
    with models.phase("reward", describe_decoding(batch), clock, is_evaluation=is_evaluation):
        if not models.scorer.is_overlapping:
            for group in decoded.images.pixels:
                decoded.scoring.add(group)
        return decoded.scoring.finish(clock.count)


def decode_and_score(
    models: Models,
    batch: PromptBatch,
    token_ids: Int64[Tensor, "P G T"],
    clock: PhaseClock | None = None,
    *,
    is_evaluation: bool = False,
) -> tuple[ImageBatch, RewardTable]:
    """`decode`, then `wait_for_scores` at once."""
    clock = clock or PhaseClock()
    with decode(models, batch, token_ids, clock, is_evaluation=is_evaluation) as decoded:
        table = wait_for_scores(models, batch, decoded, clock, is_evaluation=is_evaluation)
        return decoded.images, table
