"""Sample token grids, the same way in every family: read prompts, then sample token by token.

Random numbers are drawn on the CPU from (batch seed, prompt id) and turned into tokens by the
inverse of the cumulative distribution, so a prompt's samples depend neither on its neighbours in
the batch nor on the device's generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor
from transformers.cache_utils import DynamicCache

from glm_grpo.config.sections import RolloutSection
from glm_grpo.errors import NonFiniteError
from glm_grpo.models.base import lost_weights_remedy
from glm_grpo.models.token_step import Step
from glm_grpo.seeds import derive_seed
from glm_grpo.types import ProgressCallback, PromptBatch, Rollout, no_progress

PREFILLED_AT_ONCE = 8
"""Prompts per forward pass of a rollout."""


def prompts_at_once(prompts: int, group_size: int, batch_size: int | None) -> int:
    """Number of prompts whose images are sampled at once, at least one.

    Args:
        batch_size: Images to sample at once; None: all.
    """
    return prompts if batch_size is None else max(1, min(prompts, batch_size // group_size))


def prefill(
    read: Callable[[slice, DynamicCache], Tensor], num_rows: int
) -> tuple[Float[Tensor, "R D"], list[DynamicCache]]:
    """Read prompts in chunks, because an evaluation has many more of them than a training step.

    Args:
        read: Reads some rows with an empty cache, and returns the states of all their tokens.
        num_rows: R, rows of the language model.

    Returns:
        The last state of each row, and the keys and values of each chunk.
    """
    states: list[Tensor] = []
    caches: list[DynamicCache] = []
    for start in range(0, num_rows, PREFILLED_AT_ONCE):
        caches.append(DynamicCache())
        states.append(read(slice(start, start + PREFILLED_AT_ONCE), caches[-1])[:, -1])
    return torch.cat(states), caches


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

    @classmethod
    def of(cls, rollout: RolloutSection) -> Truncation:
        """The truncation of a config."""
        return cls(top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p)

    @property
    def is_active(self) -> bool:
        """Whether any entry can be cut."""
        is_top_p_active = self.top_p is not None and self.top_p < 1.0
        return self.top_k is not None or is_top_p_active or self.min_p is not None


class SampledTokens(NamedTuple):
    """One token per sample, its log-probability, and the entries that truncation kept."""

    token_ids: Int64[Tensor, " N"]
    log_probs: Float32[Tensor, " N"]
    sampling_mask: Bool[Tensor, "N V"] | None


def sample_tokens(
    logits: Float32[Tensor, "N V"], truncation: Truncation, uniforms: Float64[Tensor, " N"]
) -> SampledTokens:
    """Sample one token of each grid.

    Args:
        logits: Divided by the temperature.
        uniforms: In [0, 1).
    """
    sampling_mask = truncation_mask(logits, truncation) if truncation.is_active else None
    every = support_log_probs(logits, sampling_mask)
    chosen = pick_tokens(every, uniforms)
    log_probs = every.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return SampledTokens(chosen, log_probs, sampling_mask)


def join_tokens(
    sampled: Sequence[SampledTokens], batch: PromptBatch, phase: str, dtype: torch.dtype
) -> Rollout:
    """Join the tokens of all samples, made one after the other, on the CPU.

    Args:
        sampled: T times one token of each of the P * G samples, with masks on the CPU.
        phase: Phase of the run, for errors.
        dtype: Dtype of the model, for errors.

    Raises:
        NonFiniteError: A log-probability is not finite; the message names phase, prompt, sample
            and token.
    """
    shape = (len(batch.prompts), batch.group_size)
    token_ids, all_log_probs, masks = zip(*sampled, strict=True)
    log_probs = torch.stack(all_log_probs, dim=1).cpu().unflatten(0, shape)
    # Once, on the CPU: a check after each token would make the accelerator wait.
    _refuse_non_finite(log_probs, batch, phase, dtype)
    return Rollout(
        token_ids=torch.stack(token_ids, dim=1).cpu().unflatten(0, shape),
        log_probs=log_probs,
        sampling_mask=None if masks[0] is None else torch.stack(masks, dim=1).unflatten(0, shape),
    )


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


def _refuse_non_finite(
    log_probs: Float32[Tensor, "P G T"], batch: PromptBatch, phase: str, dtype: torch.dtype
) -> None:
    places = (~log_probs.isfinite()).nonzero().tolist()
    if not places:
        return
    row, sample, token = places[0]
    raise NonFiniteError(
        f"{phase}: the log-probability of token {token} of prompt "
        f"{batch.prompts[row].prompt_id}, sample {sample} is "
        f"{log_probs[row, sample, token].item()} ({len(places)} of {log_probs.numel()} tokens are "
        f"not finite): nothing can be sampled from these weights; {lost_weights_remedy(dtype)}"
    )


def draw_uniforms(batch: PromptBatch, num_tokens: int) -> Float64[Tensor, "N T"]:
    """Random numbers in [0, 1) for all tokens of the N = P * G samples."""
    rows = []
    for prompt in batch.prompts:
        generator = torch.Generator().manual_seed(derive_seed(batch.seed, prompt.prompt_id))
        shape = (batch.group_size, num_tokens)
        rows.append(torch.rand(shape, generator=generator, dtype=torch.float64))
    return torch.cat(rows)


def sample_grids(
    states: Float[Tensor, "R D"],
    step: Step,
    sample: Callable[[Tensor, Tensor], SampledTokens],
    batch: PromptBatch,
    *,
    num_tokens: int,
    on_progress: ProgressCallback = no_progress,
) -> list[SampledTokens]:
    """Sample the T tokens of all grids.

    Args:
        states: Those that predict the first tokens.
        step: Reads one token of every sample.
        sample: Samples one token of every grid from states and uniforms.
        num_tokens: T.
        on_progress: Called after each token.
    """
    uniforms = draw_uniforms(batch, num_tokens).to(states.device)
    read_and_sample = step.then(sample)
    sampled: list[SampledTokens] = []
    for index in range(num_tokens):
        if index == 0:
            tokens = sample(states, uniforms[:, 0])
        else:
            tokens = read_and_sample(tokens.token_ids, uniforms[:, index])
        if tokens.sampling_mask is not None:
            # Although the accelerator waits: the masks of all tokens, a byte for each entry of the
            # codebook, would take 1.3 GB of its memory for 64 images of 1280 tokens.
            tokens = tokens._replace(sampling_mask=tokens.sampling_mask.cpu())
        sampled.append(tokens)
        on_progress(index + 1, num_tokens)
    return sampled
