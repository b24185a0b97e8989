"""Section: compare a token step with its floor, and sampled with replayed log-probabilities."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.full_size.measuring import seconds_of
from benchmarks.full_size.scale import Bench, Rows, make_batch
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.plan.floors import rollout_floor
from glm_grpo.plan.memory import BatchShape
from glm_grpo.types import PromptBatch

_ADAPTERS = "glm_grpo.models.lora.half_factors"
_OF_STEP = "glm_grpo.models.glm_image.fast.token_step.half_factors"
"""Casts adapters to the states' dtype; without it they are multiplied in fp32."""

_MOVED = 0.01
"""Standard deviation of the adapters' second factors, which are initially zero."""

_REPLAYED = 8
"""Number of replayed samples, spread over the prompts."""


def token_step(bench: Bench) -> Rows:
    """Seconds of one token for every sample, including prefill."""
    yield "compiled", partial(_measure, bench, is_compiling=True)
    yield "bf16 adapters", partial(_measure, bench, is_compiling=False)
    yield (
        "fp32 adapters",
        partial(_measure, bench, is_compiling=False, patched=(_ADAPTERS, _OF_STEP)),
    )


def _measure(bench: Bench, *, is_compiling: bool, patched: tuple[str, ...] = ()) -> dict[str, Any]:
    scale, device = bench.scale, bench.device
    policy = bench.policy(is_compiling=is_compiling)
    with ExitStack() as stack:
        for name in patched:
            stack.enter_context(mock.patch(name, return_value=None))
        _move_adapters(policy)
        batch = make_batch(scale.side, prompts=scale.prompts, group_size=scale.group_size)
        first = seconds_of(partial(policy.sample, batch), device)
        seconds = seconds_of(partial(policy.sample, batch), device)
        gap = _replay_gap(policy, batch)
    read = policy.encode(batch).attention_mask.sum(dim=1).float().mean()
    tokens = policy.tokens_per_image(batch)
    shape = BatchShape(scale.prompts, scale.group_size, int(read))
    floor = rollout_floor(scale.planner, bench.config(), shape, bench.speed)
    return {
        "samples": shape.images,
        "tokens": tokens,
        "first_seconds": first,
        "step_seconds": seconds / tokens,
        "floor_seconds": floor / tokens,
        "ratio": seconds / floor,
        **gap,
        **bench.peak_bytes(),
    }


@torch.no_grad()
def _move_adapters(policy: GlmImagePolicy) -> None:
    torch.manual_seed(0)
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=_MOVED)


@torch.no_grad()
def _replay_gap(policy: GlmImagePolicy, batch: PromptBatch) -> dict[str, float]:
    """Sampled minus replayed log-probabilities, and their mean ratio."""
    rollout = policy.sample(batch)
    sampled = rollout.log_probs.flatten(0, 1)
    rows = torch.arange(0, len(sampled), max(1, len(sampled) // _REPLAYED))
    gaps = torch.cat(
        [
            sampled[part] - policy.replay(batch, rollout, part).log_probs.cpu()
            for part in rows.split(2)
        ]
    )
    return {
        "gap_mean": float(gaps.mean()),
        "gap_std": float(gaps.std()),
        "gap_most": float(gaps.abs().max()),
        "mean_ratio": float((-gaps).exp().mean()),
    }
