"""Turn target images into tokens for the SFT term, in addition to GRPO or instead."""

from __future__ import annotations

from dataclasses import replace

import torch

from glm_grpo.config.sections import SftSection
from glm_grpo.data.prompts import prompts_at
from glm_grpo.models.base import Preview
from glm_grpo.training.models import Models
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import PromptBatch, TargetTokens


def sft_weight(settings: SftSection, step: int, steps: int) -> float:
    """Weight of the SFT term at a step, from 1: linear from `weight` to `final_weight`."""
    if settings.final_weight is None or steps == 1:
        return settings.weight
    done = (step - 1) / (steps - 1)
    return settings.weight + done * (settings.final_weight - settings.weight)


def tokenize_targets(
    models: Models, batch: PromptBatch, *, weight: float, preview: Preview, clock: PhaseClock
) -> TargetTokens:
    """Encode the target images of a batch as token grids.

    Prompts without a target are skipped.

    Args:
        batch: Batch whose source images, if any, are encoded.
        weight: Weight of the SFT term in the loss.
        preview: How to get preview tokens, as in `sft.preview`.
        clock: Records the time as phase `sources`.

    Raises:
        MemoryLimitError: Memory ran out; the message names phase, size and remedy.
    """
    found = [place for place, prompt in enumerate(batch.prompts) if prompt.target is not None]
    rows = found or [0]
    if found:
        targets = [prompt.target for prompt in batch.prompts if prompt.target is not None]
        work = f"one target image of {batch.height} x {batch.width} pixels at a time"
        with models.phase("sources", work, clock):
            token_ids = models.policy.tokenize_images(
                torch.stack(targets), num_sources=batch.num_sources, preview=preview
            )
    else:
        token_ids = torch.zeros(1, models.policy.tokens_per_image(batch), dtype=torch.long)
    return TargetTokens(
        prompts=replace(prompts_at(batch, torch.tensor(rows)), group_size=1),
        token_ids=token_ids,
        prompt_indices=torch.tensor(found, dtype=torch.long),
        weight=weight,
    )
