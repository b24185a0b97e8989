"""Sample token grids and record the log-probability of every token.

Each distinct prompt is prefilled once; its G samples share the prefilled keys and values. Only the
codebook can be drawn, so an image can never end early and every grid is full.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers import GlmImageTextModel
from transformers.cache_utils import DynamicCache

from glm_grpo.models.drawing import (
    Drawn,
    Truncation,
    draw_tokens,
    draw_uniforms,
    join_drawn,
)
from glm_grpo.models.glm_image.fast.stock_step import StepBuilder
from glm_grpo.models.glm_image.fast.token_step import TokenStep
from glm_grpo.models.glm_image.network import GlmImageNetwork
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs
from glm_grpo.models.glm_image.token_grid import batch_layout, generated_positions
from glm_grpo.models.sampling import prefill as prefill_rows
from glm_grpo.types import Count, PromptBatch, Rollout, not_counted


def sample_rollout(
    network: GlmImageNetwork,
    inputs: PromptInputs,
    batch: PromptBatch,
    *,
    truncation: Truncation,
    phase: str = "rollout",
    build_step: StepBuilder = TokenStep,
    count: Count = not_counted,
) -> Rollout:
    """Sample G token grids for each prompt.

    Random numbers are those of `glm_grpo.models.drawing`.

    Args:
        network: In evaluation mode.
        truncation: Log-probs are those after truncation.
        phase: Phase of the run, for errors.
        build_step: Builds the step that reads one token of every sample.
        count: Called after each token.

    Raises:
        NonFiniteError: A log-probability is not finite; the message names phase, prompt, sample
            and token.
    """
    # Cheaper than `no_grad`, because no small operation records anything. Autograd cannot use its
    # tensors, so prompts are encoded outside, and copies are returned.
    with torch.inference_mode():
        sampled = _sample_grids(network, batch, inputs, truncation, build_step, count)
    return join_drawn(sampled, batch, phase, network.lm_head.weight.dtype)


def _sample_grids(
    network: GlmImageNetwork,
    batch: PromptBatch,
    inputs: PromptInputs,
    truncation: Truncation,
    build_step: StepBuilder,
    count: Count,
) -> list[Drawn]:
    group, device = batch.group_size, network.lm_head.weight.device
    layout = batch_layout(batch)
    language_model = network.language_model
    last_hidden, cache = prefill(
        language_model,
        inputs.input_ids.to(device),
        inputs.position_ids.to(device),
        attention_mask=inputs.attention_mask.to(device),
    )
    hidden_states = last_hidden.repeat_interleave(group, dim=0)
    positions = generated_positions(layout, 0).unsqueeze(1) + inputs.next_position.view(1, -1, 1)
    step = build_step(language_model, inputs, cache, group_size=group, positions=positions)
    uniforms = draw_uniforms(batch, layout.num_tokens).to(device)
    draw = partial(draw_next, network, truncation)
    read_and_draw = step.then(draw)
    sampled: list[Drawn] = []
    for index in range(layout.num_tokens):
        if index == 0:
            drawn = draw(hidden_states, uniforms[:, 0])
        else:
            drawn = read_and_draw(drawn.token_ids, uniforms[:, index])
        if drawn.sampling_mask is not None:
            drawn = drawn._replace(sampling_mask=drawn.sampling_mask.cpu())
        sampled.append(drawn)
        count(index + 1, layout.num_tokens)
    return sampled


def draw_next(
    network: GlmImageNetwork,
    truncation: Truncation,
    hidden_states: Float[Tensor, "N D"],
    uniforms: Float64[Tensor, " N"],
) -> Drawn:
    """Draw one token per sample; uniforms are in [0, 1)."""
    return draw_tokens(network.codebook_logits(hidden_states), truncation, uniforms)


def prefill(
    language_model: GlmImageTextModel,
    input_ids: Int64[Tensor, "P L"],
    position_ids: Int64[Tensor, "3 P L"],
    *,
    attention_mask: Int64[Tensor, "P L"] | None,
) -> tuple[Float[Tensor, "P D"], DynamicCache]:
    """Read prompts, see `glm_grpo.models.sampling.prefill`.

    Args:
        input_ids: Token ids, padded on the left.
        position_ids: Temporal, height, width.
        attention_mask: 1 on tokens; None if there is no padding.

    Returns:
        The last hidden state of each prompt, and the keys and values of all prompts.
    """

    def read(rows: slice, cache: DynamicCache) -> Tensor:
        states: Tensor = language_model(
            input_ids=input_ids[rows],
            attention_mask=None if attention_mask is None else attention_mask[rows],
            position_ids=position_ids[:, rows],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return states

    hidden_states, caches = prefill_rows(read, len(input_ids))
    if len(caches) == 1:
        return hidden_states, caches[0]
    joined = DynamicCache()
    for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        keys, values = (
            torch.cat([getattr(x, name) for x in layers]) for name in ("keys", "values")
        )
        joined.update(keys, values, index)
    return hidden_states, joined
