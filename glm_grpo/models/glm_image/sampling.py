"""Sample token grids and record the log-probability of every token.

Each distinct prompt is prefilled once; its G samples share the prefilled keys and values. Only the
codebook can be drawn, so an image can never end early and every grid is full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor
from transformers import GlmImageTextModel
from transformers.cache_utils import DynamicCache

from glm_grpo.errors import NonFiniteError
from glm_grpo.models.glm_image.fast.stock_step import StepBuilder
from glm_grpo.models.glm_image.fast.token_step import TokenStep
from glm_grpo.models.glm_image.network import PolicyNetwork
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs
from glm_grpo.models.glm_image.token_grid import batch_layout, generated_positions
from glm_grpo.models.memory import PREFILLED_AT_ONCE
from glm_grpo.seeds import derive_seed
from glm_grpo.types import Count, PromptBatch, Rollout, not_counted


@dataclass(frozen=True)
class Truncation:
    """Which codebook entries may be drawn.

    Attributes:
        top_k: Keep the k most probable entries; None: all.
        top_p: Keep the most probable entries until their probabilities add up to p, in (0, 1];
            None: all.
        min_p: Keep entries at least this fraction as probable as the top one, in (0, 1); None: all.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether any entry can be cut."""
        is_top_p_active = self.top_p is not None and self.top_p < 1.0
        return self.top_k is not None or is_top_p_active or self.min_p is not None


UNTRUNCATED = Truncation()


def sample_rollout(
    network: PolicyNetwork,
    inputs: PromptInputs,
    batch: PromptBatch,
    *,
    truncation: Truncation,
    phase: str = "rollout",
    build_step: StepBuilder = TokenStep,
    count: Count = not_counted,
) -> Rollout:
    """Sample G token grids for each prompt.

    Random numbers are drawn on the CPU from (batch seed, prompt id) and turned into tokens by the
    inverse of the cumulative distribution, so a prompt's samples depend neither on its neighbours
    in the batch nor on the device's generator.

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
    shape = (len(batch.prompts), batch.group_size)
    token_ids, all_log_probs, masks = zip(*sampled, strict=True)
    log_probs = torch.stack(all_log_probs, dim=1).cpu().unflatten(0, shape)
    # Once, on the CPU: a check after each token would make the accelerator wait.
    _refuse_non_finite(log_probs, batch, phase)
    return Rollout(
        token_ids=torch.stack(token_ids, dim=1).cpu().unflatten(0, shape),
        log_probs=log_probs,
        sampling_mask=torch.stack(masks, dim=1).unflatten(0, shape)
        if truncation.is_active
        else None,
    )


class Drawn(NamedTuple):
    """One token per sample, its log-probability, and the entries that truncation kept."""

    token_ids: Int64[Tensor, " N"]
    log_probs: Float32[Tensor, " N"]
    sampling_mask: Bool[Tensor, "N V"] | None


def _sample_grids(
    network: PolicyNetwork,
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
    uniforms = _uniforms(batch, layout.num_tokens).to(device)
    draw = partial(draw_tokens, network, truncation)
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


def draw_tokens(
    network: PolicyNetwork,
    truncation: Truncation,
    hidden_states: Float[Tensor, "N D"],
    uniforms: Float64[Tensor, " N"],
) -> Drawn:
    """Draw one token per sample; uniforms are in [0, 1)."""
    logits = network.codebook_logits(hidden_states)
    sampling_mask = truncation_mask(logits, truncation) if truncation.is_active else None
    every = support_log_probs(logits, sampling_mask)
    chosen = pick_tokens(every, uniforms)
    log_probs = every.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return Drawn(chosen, log_probs, sampling_mask)


def prefill(
    language_model: GlmImageTextModel,
    input_ids: Int64[Tensor, "P L"],
    position_ids: Int64[Tensor, "3 P L"],
    *,
    attention_mask: Int64[Tensor, "P L"] | None,
) -> tuple[Float[Tensor, "P D"], DynamicCache]:
    """Prefill prompts in chunks, because an evaluation has many more of them than a training step.

    Args:
        input_ids: Token ids, padded on the left.
        position_ids: Temporal, height, width.
        attention_mask: 1 on tokens; None if there is no padding.

    Returns:
        The last hidden state of each prompt, and the keys and values of all prompts.
    """
    hidden_states: list[Tensor] = []
    caches: list[DynamicCache] = []
    for start in range(0, len(input_ids), PREFILLED_AT_ONCE):
        rows = slice(start, start + PREFILLED_AT_ONCE)
        caches.append(DynamicCache())
        read = language_model(
            input_ids=input_ids[rows],
            attention_mask=None if attention_mask is None else attention_mask[rows],
            position_ids=position_ids[:, rows],
            past_key_values=caches[-1],
            use_cache=True,
        )
        hidden_states.append(read.last_hidden_state[:, -1])
    if len(caches) == 1:
        return hidden_states[0], caches[0]
    joined = DynamicCache()
    for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        keys, values = (
            torch.cat([getattr(x, name) for x in layers]) for name in ("keys", "values")
        )
        joined.update(keys, values, index)
    return torch.cat(hidden_states), joined


def truncation_mask(logits: Float32[Tensor, "N V"], truncation: Truncation) -> Bool[Tensor, "N V"]:
    """True on the entries that top-k, then top-p, then min-p keep; at least one per row.

    Source: top-p, Holtzman et al. 2020 (arXiv 1904.09751), section 3.1; min-p, Nguyen et al. 2024
    (arXiv 2407.01082), section 3.1. The order is that of transformers' logits processors.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    sampling_mask = torch.ones_like(ordered, dtype=torch.bool)
    if truncation.top_k is not None:
        sampling_mask[:, truncation.top_k :] = False
    if truncation.top_p is not None:
        probabilities = ordered.masked_fill(~sampling_mask, -torch.inf).softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        sampling_mask &= before < truncation.top_p
        sampling_mask[:, 0] = True
    if truncation.min_p is not None:
        # A ratio of probabilities does not depend on what was cut before.
        sampling_mask &= ordered >= ordered[:, :1] + math.log(truncation.min_p)
    return torch.zeros_like(sampling_mask).scatter(-1, order, sampling_mask)


def support_log_probs(
    logits: Float32[Tensor, "*N V"], sampling_mask: Bool[Tensor, "*N V"] | None
) -> Float32[Tensor, "*N V"]:
    """Normalised log-probabilities over the kept entries; -inf on the others."""
    if sampling_mask is not None:
        logits = logits.masked_fill(~sampling_mask, -torch.inf)
    return logits.log_softmax(dim=-1)


def pick_tokens(
    log_probs: Float32[Tensor, "N V"], uniforms: Float64[Tensor, " N"]
) -> Int64[Tensor, " N"]:
    """Inverse-transform sampling; an entry of probability zero is never drawn.

    Sums are in fp64, because over 16384 entries fp32 would lose the tail. A row with NaN yields
    some valid index, whose log-probability is then NaN: an index out of range would fail an
    assertion on the accelerator, which the process could not use afterwards.

    Args:
        log_probs: Normalised; -inf on entries that may not be drawn.
        uniforms: In [0, 1).
    """
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    # Scaled by the sum, so that rounding leaves no gap above the last entry.
    thresholds = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    return sampled.clamp(max=log_probs.shape[-1] - 1)


def _refuse_non_finite(log_probs: Float32[Tensor, "P G T"], batch: PromptBatch, phase: str) -> None:
    places = (~log_probs.isfinite()).nonzero().tolist()
    if not places:
        return
    row, sample, token = places[0]
    raise NonFiniteError(
        f"{phase}: the log-probability of token {token} of prompt "
        f"{batch.prompts[row].prompt_id}, sample {sample} is "
        f"{log_probs[row, sample, token].item()} ({len(places)} of {log_probs.numel()} tokens are "
        "not finite); nothing can be sampled from these weights, or they overflow in model.dtype. "
        "In a new run lower optim.learning_rate or optim.max_grad_norm"
    )


def _uniforms(batch: PromptBatch, num_tokens: int) -> Float64[Tensor, "N T"]:
    rows = []
    for prompt in batch.prompts:
        generator = torch.Generator().manual_seed(derive_seed(batch.seed, prompt.prompt_id))
        shape = (batch.group_size, num_tokens)
        rows.append(torch.rand(shape, generator=generator, dtype=torch.float64))
    return torch.cat(rows)
