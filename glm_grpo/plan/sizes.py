"""What a config asks of memory: how the policy is held, and what a step works on."""

from __future__ import annotations

import math
from dataclasses import replace

from glm_grpo.config import Config
from glm_grpo.models.base import DTYPES, Quantization
from glm_grpo.models.planning import BatchSizes, ModelSettings
from glm_grpo.training.data.prompts import evaluated_at_once


def model_settings(config: Config, *, is_on_accelerator: bool) -> ModelSettings:
    """How the policy is held."""
    adapter = config.model.adapter
    return ModelSettings(
        dtype=DTYPES[config.model.dtype],
        adapter_rank=None if adapter is None else adapter.rank,
        is_checkpointing=config.model.gradient_checkpointing,
        needs_reference=config.loss.kl_coef > 0,
        is_on_accelerator=is_on_accelerator,
        quantization=Quantization(
            language=config.model.quantization, decoder=config.decode.quantization
        ),
    )


def batch_sizes(config: Config, *, prompt_tokens: int, processes: int = 1) -> BatchSizes:
    """What one step works on, in the process that has most of it.

    Args:
        config: Of the run.
        prompt_tokens: Of the longest prompt.
        processes: That share the prompts.
    """
    rollout = config.rollout
    prompts = math.ceil(rollout.prompts_per_step / processes)
    return BatchSizes(
        prompts=prompts,
        group_size=rollout.group_size,
        height=rollout.height,
        width=rollout.width,
        prompt_tokens=prompt_tokens,
        micro_batch_size=min(config.train.micro_batch_size, prompts * rollout.group_size),
        is_truncated=rollout.top_k is not None
        or (rollout.top_p is not None and rollout.top_p < 1.0),
        decode_batch_size=config.decode.batch_size,
    )


def evaluation_sizes(config: Config, *, prompt_tokens: int, processes: int = 1) -> BatchSizes:
    """What an evaluation works on at once, if there are as many held-out prompts."""
    sizes = batch_sizes(config, prompt_tokens=prompt_tokens, processes=processes)
    samples = config.eval.samples_per_prompt
    images = config.rollout.prompts_per_step * config.rollout.group_size // processes
    return replace(sizes, prompts=evaluated_at_once(images, samples), group_size=samples)
