"""Deal the prompts of a step, as the config says."""

from __future__ import annotations

from glm_grpo.config import Config
from glm_grpo.data.prompts import PromptSource, SparePrompts, batch_for_step, spares_for_step
from glm_grpo.types import PromptBatch


def build_batch(config: Config, prompts: PromptSource, step: int) -> PromptBatch:
    """Batch of a step, from 1."""
    return batch_for_step(
        prompts,
        step=step,
        seed=config.train.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
    )


def build_spares(config: Config, prompts: PromptSource, step: int) -> SparePrompts:
    """Prompts that can replace those of a step, from 1."""
    return spares_for_step(
        prompts,
        step=step,
        seed=config.train.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
    )
