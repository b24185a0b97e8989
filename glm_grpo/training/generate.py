"""Generate and score the images of a batch: encode sources, sample, decode, score."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int64
from torch import Tensor

from glm_grpo.training.phase import Models, PhaseClock, decoding_size, sampling_size
from glm_grpo.types import ImageBatch, PromptBatch, Rollout
from rewards.parts import Grid
from rewards.types import RewardTable


def encode_sources(
    models: Models,
    batch: PromptBatch,
    clock: PhaseClock | None = None,
    *,
    is_evaluation: bool = False,
) -> PromptBatch:
    """Encode the source pictures of a batch as tokens; a batch without any is returned unchanged.

    Raises:
        MemoryLimitError: Memory ran out; the message names phase, size and remedy.
    """
    if batch.num_sources == 0:
        return batch
    size = f"one source image of {batch.height} x {batch.width} pixels at a time"
    with models.phase("sources", size, clock, is_evaluation=is_evaluation):
        return models.policy.encode_sources(batch)


def sample(
    models: Models,
    batch: PromptBatch,
    *,
    clock: PhaseClock | None = None,
    is_evaluation: bool = False,
) -> Rollout:
    """Sample G token grids for each prompt.

    Raises:
        NonFiniteError: A log-probability is not finite.
        MemoryLimitError: Memory ran out; the message names phase, size and remedy.
    """
    clock = clock or PhaseClock()
    size = sampling_size(batch, models.policy)
    with models.phase("rollout", size, clock, is_evaluation=is_evaluation):
        return models.policy.sample(
            batch,
            phase="evaluation" if is_evaluation else "rollout",
            count=clock.count,
        )


def decode_and_score(
    models: Models,
    batch: PromptBatch,
    token_ids: Int64[Tensor, "P G T"],
    clock: PhaseClock | None = None,
    *,
    is_evaluation: bool = False,
    meanwhile: Callable[[], object] | None = None,
    grid: Grid | None = None,
) -> tuple[ImageBatch, RewardTable]:
    """Decode prompt by prompt; score groups while later ones decode, if the terms allow it.

    The phase `reward` is the time the step waits for scores after the last image is decoded and
    `meanwhile` is done. Terms whose networks wait in CPU memory during decoding start then.
    `is_evaluation` selects the terms that score, and the remedies when memory runs out. With
    `grid`, the table says what each place earned.

    Raises:
        RewardError: A term failed; the message names term, prompt and image.
        MemoryLimitError: Memory ran out; the message names phase, size and remedy.
    """
    clock = clock or PhaseClock()
    is_resident = not models.offload.moves("rewards")
    scoring = models.scorer.begin(
        batch.prompts, is_resident=is_resident, is_training=not is_evaluation, grid=grid
    )
    groups, size = [], decoding_size(batch)
    with models.phase("decode", size, clock, is_evaluation=is_evaluation):
        for group in models.decoder.decode_groups(batch, token_ids):
            groups.append(group)
            clock.count(len(groups), len(batch.prompts))
            if models.scorer.is_overlapping:
                scoring.add(group)
    if meanwhile is not None:
        meanwhile()
    with models.phase("reward", size, clock, is_evaluation=is_evaluation):
        if not models.scorer.is_overlapping:
            for group in groups:
                scoring.add(group)
        table = scoring.finish(clock.count)
    return ImageBatch(pixels=torch.stack(groups), decode_seeds=batch.decode_seeds), table
