"""A cache of rollouts, for tests whose subject is not sampling."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.types import PromptBatch, Rollout


def cached_sampling(folder: Path) -> Callable[..., Rollout]:
    """`GlmImagePolicy.sample`, but for what was sampled before, which is read.

    A rollout is a pure function of weights, sampler and prompts. Tests of that do without.

    Args:
        folder: Of the rollouts, made where it is missing; other processes may use it meanwhile.
    """
    sample = GlmImagePolicy.sample
    folder.mkdir(parents=True, exist_ok=True)

    def sample_or_read(policy: GlmImagePolicy, batch: PromptBatch, **options: Any) -> Rollout:
        # `count`, told of every token, is another function in every run.
        key = {name: value for name, value in options.items() if name != "count"}
        path = folder / _digest(policy, batch, key)
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            torch.save(sample(policy, batch, **options), unfinished)
            unfinished.rename(path)
        rollout: Rollout = torch.load(path, weights_only=False)
        return rollout

    return sample_or_read


def _digest(policy: GlmImagePolicy, batch: PromptBatch, options: dict[str, Any]) -> str:
    # Scale of each adapter, and whether it is used: no part of the state.
    adapters = [
        (module.scaling, module.disable_adapters)
        for module in policy.model.modules()
        if isinstance(module, LoraLayer)
    ]
    settings = (
        policy._truncation,
        policy.network.temperature,
        adapters,
        [(each.prompt_id, each.prompt) for each in batch.prompts],
        (batch.group_size, batch.height, batch.width, batch.seed),
        sorted((name, value) for name, value in options.items() if name != "first_tokens"),
    )
    digest = hashlib.sha256(repr(settings).encode())
    for tensor in (
        *policy.model.state_dict().values(),
        *(source for each in batch.prompts for source in each.sources),
        batch.source_token_ids,
        options.get("first_tokens"),
    ):
        if tensor is not None:
            digest.update(repr((tensor.dtype, tensor.shape)).encode())
            held = tensor.detach().cpu().flatten().contiguous()
            digest.update(held.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
