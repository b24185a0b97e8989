"""Stage `policy`: train the language model to map captions to tokens.

First with true captions, then with careless ones, which leave the intended imperfection for GRPO to
remove. One caption in ten is replaced by padding, from which the model learns what guidance
compares with.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.nn import functional
from transformers import JanusForConditionalGeneration, JanusProcessor

from glm_grpo.models.janus_pro.prompt_inputs import (
    PromptInputs,
    SpecialIds,
    encode_prompts,
    special_ids,
)
from glm_grpo.tiny.objects import world
from tools.tiny.stage import Schedule, train_stage

_BATCH = 40
_WITHOUT_CAPTION = 0.1
_CONTENT_WEIGHT = 4.0
"""Further weight of which cell a shape shows, given that it shows one. Where shapes are is chance,
and would otherwise drown what the caption tells."""


def train_policy(
    model: JanusForConditionalGeneration,
    processor: JanusProcessor,
    *,
    clean_steps: int,
    careless_steps: int,
    careless_rate: float,
    folder: Path,
    seed: int,
) -> None:
    """Train language model, image embeddings and head of `model` in place.

    Args:
        processor: Encodes the captions.
        clean_steps: Steps of 40 images with true captions.
        careless_steps: Further steps with careless captions.
        careless_rate: See `world.careless`.
        seed: Seed of the whole pre-training.
    """
    inner = model.model
    trained = (
        inner.language_model,
        inner.generation_embeddings,
        inner.generation_aligner,
        inner.generation_head,
    )
    model.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)
    ids = special_ids(model, processor)

    def loss_of(rng: np.random.Generator, rate: float) -> Float32[Tensor, ""]:
        asked = [world.random_request(rng) for _ in range(_BATCH)]
        drawn = [world.careless(each, rng, rate) for each in asked]
        cells = torch.stack([world.scene_cells(world.arrange(each, rng)) for each in drawn])
        inputs = encode_prompts(processor, [world.caption(each) for each in asked], ids)
        is_dropped = torch.from_numpy(rng.random(_BATCH) < _WITHOUT_CAPTION)
        return caption_loss(model, _without_captions(inputs, is_dropped, ids), cells.flatten(1))

    train_stage(
        "policy-clean",
        trained,
        lambda rng, generator, step: loss_of(rng, 0.0),
        schedule=Schedule(steps=clean_steps, learning_rate=2e-3),
        folder=folder,
        seed=seed,
    )
    train_stage(
        "policy-careless",
        trained,
        lambda rng, generator, step: loss_of(rng, careless_rate),
        schedule=Schedule(steps=careless_steps, learning_rate=7e-4, warmup_steps=20),
        folder=folder,
        seed=seed,
    )


def caption_loss(
    model: JanusForConditionalGeneration, inputs: PromptInputs, tokens: Int64[Tensor, "B T"]
) -> Float32[Tensor, ""]:
    """Loss per token of images after their prompts, in nats; see `_CONTENT_WEIGHT`."""
    inner = model.model
    seen = tokens[:, :-1]
    embedded = torch.cat(
        [
            inner.language_model.embed_tokens(inputs.input_ids),
            model.prepare_embeddings_for_image_generation(seen),
        ],
        dim=1,
    )
    mask = torch.cat([inputs.attention_mask, torch.ones_like(seen)], dim=1)
    hidden = inner.language_model(
        inputs_embeds=embedded,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
    logits = inner.generation_head(hidden[:, inputs.input_ids.shape[1] - 1 :]).flatten(0, 1)
    wanted = tokens.flatten()
    is_shape = wanted != 0
    # The first cell is blank.
    content = functional.cross_entropy(logits[is_shape, 1:], wanted[is_shape] - 1, reduction="sum")
    return functional.cross_entropy(logits, wanted) + _CONTENT_WEIGHT * content / len(wanted)


def _without_captions(inputs: PromptInputs, is_dropped: Tensor, ids: SpecialIds) -> PromptInputs:
    both = inputs.with_unconditional(ids)
    rows = torch.arange(len(is_dropped)) + len(is_dropped) * is_dropped
    return PromptInputs(both.input_ids[rows], both.attention_mask[rows])
