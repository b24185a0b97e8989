"""Section: decoding against the floor of its operations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.full_size.measuring import seconds_of
from benchmarks.full_size.models import pipeline_of, random_decoder_part
from benchmarks.full_size.scale import Bench, make_batch
from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.memory import GlmImagePlanner
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.plan.floors import decode_flops

GUIDANCE_SCALE = 1.5
"""As published: a step costs two passes."""


def decode(bench: Bench) -> Iterator[dict[str, Any]]:
    """Seconds of a group drawn at once, by side of its pictures."""
    scale = bench.scale
    pipeline = pipeline_of(random_decoder_part(scale.configs, scale.torch_dtype, bench.device))
    codebook = pipeline.transformer.config.prior_vq_quantizer_codebook_size
    decoder = GlmImageDecoder(pipeline, steps=scale.decode_steps, guidance_scale=GUIDANCE_SCALE)
    for side, images in scale.decoded:
        batch = make_batch(side, prompts=1, group_size=images)
        tokens = token_layout(side, side).num_tokens
        token_ids = torch.randint(codebook, (1, images, tokens))
        # Kernels are chosen by size.
        decoder.with_steps(1).decode(batch, token_ids)
        seconds = seconds_of(partial(decoder.decode, batch, token_ids), bench.device)
        flops = decode_flops(
            *GlmImagePlanner(scale.configs).decoder_flops(side, side),
            images=images,
            steps=scale.decode_steps,
            guidance_scale=GUIDANCE_SCALE,
        )
        floor = flops / bench.speed.flops
        yield {
            "side": side,
            "images": images,
            "steps": scale.decode_steps,
            "seconds": seconds,
            "floor_seconds": floor,
            "ratio": seconds / floor,
        }
