"""Sections: a token step against its floor, and a rollout against stock `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.full_size.measuring import seconds_of
from benchmarks.full_size.models import pipeline_of, random_language_part
from benchmarks.full_size.scale import Bench, make_batch
from glm_grpo.builders.models import build_policy
from glm_grpo.models.glm_image.memory import GlmImagePlanner
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.plan.floors import SequenceSizes, rollout_floor
from glm_grpo.types import PromptBatch

STEP_BOUND, BOUND_AT = 1.6, 8
"""Of a token step over its floor on an accelerator, and for so many samples."""

STOCK_BOUND = 5.0
"""Of our tokens a second over those of stock `generate`, on an accelerator."""


def token_step(bench: Bench) -> Iterator[dict[str, Any]]:
    """Seconds of a token of every sample, prefill included, by number of samples."""
    scale = bench.scale
    language = random_language_part(scale.configs, scale.torch_dtype, bench.device)
    policy = build_policy(bench.card_config, pipeline_of(language), needs_reference=False)
    work = GlmImagePlanner(scale.configs).language_work(bench.settings(bench.card_config))
    for samples in scale.batches:
        batch = make_batch(scale.token_side, prompts=1, group_size=samples)
        tokens = token_layout(batch.height, batch.width).num_tokens
        seconds = seconds_of(partial(_sample, policy, batch), bench.device, repeats=scale.repeats)
        sizes = SequenceSizes(
            prompts=1,
            group_size=samples,
            prompt_tokens=policy.encode(batch).input_ids.shape[1],
            tokens=tokens,
        )
        floor = rollout_floor(work, sizes, bench.speed)
        row: dict[str, Any] = {
            "samples": samples,
            "tokens": tokens,
            "step_seconds": seconds / tokens,
            "floor_seconds": floor / tokens,
            "ratio": seconds / floor,
            "tokens_per_second": samples * tokens / seconds,
        }
        if samples == BOUND_AT and bench.is_on_accelerator:
            row |= {"at_most": STEP_BOUND, "is_held": row["ratio"] <= STEP_BOUND}
        yield row


def generate(bench: Bench) -> Iterator[dict[str, Any]]:
    """Tokens a second against stock `generate`, full grids of the same number of samples."""
    scale, device = bench.scale, bench.device
    pipeline = pipeline_of(random_language_part(scale.configs, scale.torch_dtype, device))
    batch = make_batch(scale.stock_side, prompts=1, group_size=scale.stock_batch)
    captions = [batch.prompts[0].prompt] * scale.stock_batch
    tokens = token_layout(batch.height, batch.width).num_tokens

    def stock() -> None:
        with torch.no_grad():
            pipeline.generate_prior_tokens(captions, batch.height, batch.width, device=device)

    # Before adapters are put on: the published model has none.
    stock_seconds = seconds_of(stock, device, repeats=scale.repeats)
    policy = build_policy(bench.card_config, pipeline, needs_reference=False)
    seconds = seconds_of(partial(_sample, policy, batch), device, repeats=scale.repeats)
    drawn = scale.stock_batch * tokens
    ratio = stock_seconds / seconds
    row: dict[str, Any] = {
        "samples": scale.stock_batch,
        "tokens": tokens,
        "tokens_per_second": drawn / seconds,
        "stock_tokens_per_second": drawn / stock_seconds,
        "ratio": ratio,
    }
    if bench.is_on_accelerator:
        row |= {"at_least": STOCK_BOUND, "is_held": ratio >= STOCK_BOUND}
    yield row


def _sample(policy: GlmImagePolicy, batch: PromptBatch) -> None:
    policy.sample(batch, policy_step=0)
