"""Refuse configs that these processes, or this machine, cannot run."""

from __future__ import annotations

import math

import torch

from glm_grpo.config import Config
from glm_grpo.errors import ConfigError
from glm_grpo.models.base import DTYPES
from glm_grpo.models.planning import Parallelism


def refuse_for_processes(config: Config, parallelism: Parallelism) -> None:
    """Refuse what this many processes, or shards, cannot run."""
    if config.rollout.prompts_per_step < parallelism.count:
        raise ConfigError(
            f"rollout.prompts_per_step is {config.rollout.prompts_per_step}: each of the "
            f"{parallelism.count} processes samples its own prompts of a step, and needs at least "
            f"one; raise it to {parallelism.count} or more, or start fewer processes"
        )
    dtype = config.model.dtype
    is_kept_in_fp32 = parallelism.is_sharded and parallelism.is_mixed
    if dtype == "float16" and is_kept_in_fp32:
        raise ConfigError(
            "model.dtype is float16: with mixed_precision bf16, as in "
            "configs/accelerate/fsdp2.yaml, shards compute in bfloat16; set model.dtype=bfloat16, "
            "or start with configs/accelerate/ddp.yaml"
        )
    if config.model.adapter is None and dtype != "float32" and not is_kept_in_fp32:
        bits = 1 - round(math.log2(torch.finfo(DTYPES[dtype]).eps))
        raise ConfigError(
            f"model.dtype is {dtype} and model.adapter null: {dtype} weights keep {bits} bits, so "
            "the small updates of fine-tuning round to no change at all; start several processes "
            "with configs/accelerate/fsdp2.yaml, which keeps weights in float32, or set "
            "'model.adapter={rank: 32, alpha: 64.0}' (adapters are float32) or model.dtype=float32"
        )
    if parallelism.is_sharded and config.model.quantization is not None:
        raise ConfigError(
            f"model.quantization is {config.model.quantization}: such weights cannot be sharded; "
            "leave it null, or start with configs/accelerate/ddp.yaml, which copies them"
        )
    if parallelism.is_sharded and config.loss.reference_sync_steps is not None:
        raise ConfigError(
            f"loss.reference_sync_steps is {config.loss.reference_sync_steps}: the reference is "
            "not sharded like the policy, and cannot follow it; leave it null, or start with "
            "configs/accelerate/ddp.yaml"
        )
    starts_adapter = config.model.start_from is not None and config.model.adapter is not None
    if parallelism.is_sharded and starts_adapter and config.needs_reference:
        raise ConfigError(
            f"model.start_from is {config.model.start_from!r}: with sharded adapters the reference "
            "can only be the model without adapters; export that run as a pipeline (glm-grpo "
            "export --format pipeline) and set model.path to it, set loss.kl_coef=0, or start with "
            "configs/accelerate/ddp.yaml"
        )
    if parallelism.is_sharded and config.eval.ema_decay is not None:
        raise ConfigError(
            f"eval.ema_decay is {config.eval.ema_decay}: no average of sharded weights is kept; "
            "leave it null, or start with configs/accelerate/ddp.yaml"
        )


def refuse_without_accelerator(quantization: str | None, *, is_on_accelerator: bool) -> None:
    """Check the accelerator before anything is loaded.

    Args:
        is_on_accelerator: Whether there is an accelerator.
    """
    if quantization is not None and not is_on_accelerator:
        raise ConfigError(
            f"model.quantization is {quantization!r}: 4-bit weights need an accelerator, and none "
            "was found; leave model.quantization out"
        )
