"""Sample token grids under guidance, and record the log-probability of every token.

Each prompt is read once, with and without its text; its G samples continue both rows.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers.cache_utils import DynamicCache

from glm_grpo.models.drawing import Drawn, Truncation, draw_tokens, draw_uniforms, join_drawn
from glm_grpo.models.janus_pro.network import JanusNetwork, positions
from glm_grpo.models.janus_pro.prompt_inputs import PromptInputs
from glm_grpo.models.janus_pro.token_step import StepBuilder, TokenStep
from glm_grpo.models.lora import held_factors
from glm_grpo.models.sampling import prefill
from glm_grpo.types import Count, PromptBatch, Rollout, not_counted


def sample_rollout(
    network: JanusNetwork,
    inputs: PromptInputs,
    batch: PromptBatch,
    *,
    num_tokens: int,
    truncation: Truncation,
    phase: str = "rollout",
    build_step: StepBuilder = TokenStep,
    count: Count = not_counted,
) -> Rollout:
    """Sample G token grids for each prompt.

    Random numbers are those of `glm_grpo.models.drawing`.

    Args:
        network: In evaluation mode.
        inputs: The prompts; with guidance also those without text, see `with_unconditional`.
        num_tokens: T.
        truncation: Log-probs are those after truncation.
        phase: Phase of the run, for errors.
        build_step: Builds the step that reads one token of every sample.
        count: Called after each token.

    Raises:
        NonFiniteError: A log-probability is not finite; the message names phase, prompt, sample
            and token.
    """
    # Cheaper than `no_grad`; autograd cannot use its tensors, so copies are returned.
    with torch.inference_mode(), held_factors(network.language_model):
        sampled = _sample_grids(network, inputs, batch, num_tokens, truncation, build_step, count)
    dtype = network.generation_head.vision_head.weight.dtype
    return join_drawn(sampled, batch, phase, dtype)


def _sample_grids(
    network: JanusNetwork,
    inputs: PromptInputs,
    batch: PromptBatch,
    num_tokens: int,
    truncation: Truncation,
    build_step: StepBuilder,
    count: Count,
) -> list[Drawn]:
    group, device = batch.group_size, network.generation_head.vision_head.weight.device
    mask = None if inputs.attention_mask.all() else inputs.attention_mask.to(device)
    last_hidden, caches = _prefill(network, inputs.input_ids.to(device), mask)
    states = last_hidden.repeat_interleave(group, dim=0)
    step = build_step(network, caches, mask, group_size=group, num_tokens=num_tokens)
    # Copied for every sample.
    del caches
    uniforms = draw_uniforms(batch, num_tokens).to(device)
    draw = partial(draw_next, network, truncation)
    read_and_draw = step.then(draw)
    sampled: list[Drawn] = []
    for index in range(num_tokens):
        if index == 0:
            drawn = draw(states, uniforms[:, 0])
        else:
            drawn = read_and_draw(drawn.token_ids, uniforms[:, index])
        if drawn.sampling_mask is not None:
            drawn = drawn._replace(sampling_mask=drawn.sampling_mask.cpu())
        sampled.append(drawn)
        count(index + 1, num_tokens)
    return sampled


def draw_next(
    network: JanusNetwork,
    truncation: Truncation,
    states: Float[Tensor, "R D"],
    uniforms: Float64[Tensor, " N"],
) -> Drawn:
    """Draw one token per sample; uniforms are in [0, 1)."""
    return draw_tokens(network.logits(states), truncation, uniforms)


def _prefill(
    network: JanusNetwork, input_ids: Int64[Tensor, "R L"], mask: Int64[Tensor, "R L"] | None
) -> tuple[Float[Tensor, "R D"], list[DynamicCache]]:
    """Read prompts, see `glm_grpo.models.sampling.prefill`."""

    def read(rows: slice, cache: DynamicCache) -> Tensor:
        states: Tensor = network.language_model(
            input_ids=input_ids[rows],
            attention_mask=None if mask is None else mask[rows],
            position_ids=None if mask is None else positions(mask[rows]),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return states

    return prefill(read, len(input_ids))
