"""Samples token grids and records the log-probability of every token.

Each distinct prompt is prefilled once; its G samples share the prefilled keys and values. Only the
codebook can be drawn, so an image can never end early and every grid is full.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor
from transformers.cache_utils import DynamicCache

from glm_grpo.glm_image.policy import Policy, support_log_probs
from glm_grpo.glm_image.token_grid import generated_positions, token_layout
from glm_grpo.glm_image.token_step import TokenStep
from glm_grpo.seeds import derive_seed
from glm_grpo.types import PromptBatch, Rollout


@dataclass(frozen=True)
class Truncation:
    """Which entries may be drawn.

    Attributes:
        top_k: Only the k most probable; None: all.
        top_p: Only the most probable until their sum reaches p, in (0, 1]; None: all.
    """

    top_k: int | None = None
    top_p: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether anything is cut."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1.0)


@torch.no_grad()
def sample_rollout(
    policy: Policy, batch: PromptBatch, *, truncation: Truncation, policy_step: int
) -> Rollout:
    """Samples G token grids for each prompt.

    Random numbers are drawn on the CPU from (batch seed, prompt id) and turned into tokens by the
    inverse of the cumulative distribution, so a prompt's samples depend neither on its neighbours
    in the batch nor on the device's generator.

    Args:
        policy: In evaluation mode.
        batch: P prompts, G samples each.
        truncation: Of the distribution; log-probs are those after it.
        policy_step: Recorded in the rollout.
    """
    group, device = batch.group_size, policy.device
    layout = token_layout(batch.height, batch.width)
    language_model = policy.model.model.language_model
    inputs = policy.encode(batch)
    cache = DynamicCache()
    hidden_states = (
        language_model(
            input_ids=inputs.input_ids.to(device),
            attention_mask=inputs.attention_mask.to(device),
            position_ids=inputs.position_ids.to(device),
            past_key_values=cache,
            use_cache=True,
        )
        .last_hidden_state[:, -1]
        .repeat_interleave(group, dim=0)
    )
    positions = generated_positions(layout, 0).unsqueeze(1) + inputs.next_position.view(1, -1, 1)
    step = TokenStep(language_model, inputs, cache, group_size=group, positions=positions)
    uniforms = _uniforms(batch, layout.num_tokens).to(device)
    token_ids: list[Tensor] = []
    log_probs: list[Tensor] = []
    kept: list[Tensor] = []
    for index in range(layout.num_tokens):
        if index > 0:
            hidden_states = step(token_ids[-1])
        logits = policy.codebook_logits(hidden_states)
        is_kept = kept_entries(logits, truncation) if truncation.is_active else None
        every = support_log_probs(logits, is_kept)
        chosen = draw(every, uniforms[:, index])
        token_ids.append(chosen)
        log_probs.append(every.gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
        if is_kept is not None:
            kept.append(is_kept.cpu())
    shape = (len(batch.prompts), group)
    return Rollout(
        token_ids=torch.stack(token_ids, dim=1).cpu().unflatten(0, shape),
        log_probs=torch.stack(log_probs, dim=1).cpu().unflatten(0, shape),
        is_kept=torch.stack(kept, dim=1).unflatten(0, shape) if kept else None,
        policy_step=policy_step,
    )


def kept_entries(logits: Float32[Tensor, "N V"], truncation: Truncation) -> Bool[Tensor, "N V"]:
    """True on the entries that top-k, then top-p leave; at least one a row.

    Source: top-p, Holtzman et al. 2020 (arXiv 1904.09751), section 3.1.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    is_kept = torch.ones_like(ordered, dtype=torch.bool)
    if truncation.top_k is not None:
        is_kept[:, truncation.top_k :] = False
    if truncation.top_p is not None:
        probabilities = ordered.masked_fill(~is_kept, -torch.inf).softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        is_kept &= before < truncation.top_p
        is_kept[:, 0] = True
    return torch.zeros_like(is_kept).scatter(-1, order, is_kept)


def draw(log_probs: Float32[Tensor, "N V"], uniforms: Float64[Tensor, " N"]) -> Int64[Tensor, " N"]:
    """Inverse-transform sampling; an entry of probability zero is never drawn.

    Sums run in fp64: over 16384 entries fp32 would lose the tail.

    Args:
        log_probs: Normalised; -inf where nothing may be drawn.
        uniforms: In [0, 1).
    """
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    # Scaling by the sum keeps rounding from leaving a gap above the last entry.
    thresholds = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)


def _uniforms(batch: PromptBatch, num_tokens: int) -> Float64[Tensor, "N T"]:
    rows = []
    for prompt in batch.prompts:
        generator = torch.Generator().manual_seed(derive_seed(batch.seed, prompt.prompt_id))
        shape = (batch.group_size, num_tokens)
        rows.append(torch.rand(shape, generator=generator, dtype=torch.float64))
    return torch.cat(rows)
