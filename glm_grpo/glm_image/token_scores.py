"""Log-probabilities of tokens from hidden states, without logits of all tokens at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

_LOWEST = -1e4
"""Stands for -inf where a product with 0 must be 0: exp(-1e4) is 0 in fp32."""

CHUNK_ENTRIES = 2**23
"""Logits made at once: 32 MB in fp32."""


@dataclass(frozen=True)
class TokenScores:
    """What a distribution says of the tokens that were drawn.

    Attributes:
        log_probs: Natural logarithm of each token's probability; with gradient.
        entropy: Of the distribution at each token, nats; without.
    """

    log_probs: Float32[Tensor, "*N"]
    entropy: Float32[Tensor, "*N"]


def score_tokens(
    hidden_states: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    token_ids: Int64[Tensor, "*N"],
    *,
    temperature: float,
    is_kept: Bool[Tensor, "*N V"] | None = None,
) -> TokenScores:
    """Log-probability and entropy of each token under softmax(hidden @ weight.T / temperature).

    Equals the plain computation to rounding. Logits exist for `CHUNK_ENTRIES / V` tokens at a time
    and are computed again in the backward pass, so memory does not grow with the vocabulary.
    Source: Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models
    (arXiv 2411.09009), section 4, without its kernels.

    Args:
        hidden_states: Of the last layer, normalised.
        weight: Of the head, cut to the entries that can be drawn.
        token_ids: In 0..V-1.
        temperature: > 0.
        is_kept: Entries that truncation left; None for all.
    """
    log_probs, entropy = _Score.apply(
        hidden_states.flatten(0, -2),
        weight,
        token_ids.flatten(),
        temperature,
        None if is_kept is None else is_kept.flatten(0, -2),
    )
    return TokenScores(log_probs.view(token_ids.shape), entropy.view(token_ids.shape))


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        temperature: float,
        is_kept: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, log_sums = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for rows in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[rows], weight, temperature, is_kept, rows)
            log_probs[rows] = logits.gather(-1, token_ids[rows, None]).squeeze(-1)
            highest = logits.amax(dim=-1, keepdim=True)
            logits.sub_(highest)
            masses = logits.exp()
            total = masses.sum(dim=-1)
            log_sums[rows] = highest.squeeze(-1) + total.log()
            # An entry of mass 0 adds nothing, also where its logit is -inf.
            expected = torch.linalg.vecdot(masses, logits.clamp_(min=_LOWEST)) / total
            entropy[rows] = total.log() - expected
        log_probs -= log_sums
        ctx.save_for_backward(hidden, weight, token_ids, log_sums, is_kept)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, token_ids, log_sums, is_kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        for_hidden = torch.empty_like(hidden) if needs_hidden else None
        for_weight = torch.zeros_like(weight) if needs_weight else None
        for rows in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[rows], weight, ctx.temperature, is_kept, rows)
            # d log p(token) / d logits = one_hot(token) - p.
            slopes = logits.sub_(log_sums[rows, None]).exp_().neg_()
            slopes.scatter_add_(-1, token_ids[rows, None], torch.ones_like(slopes[:, :1]))
            slopes = slopes.mul_((gradient[rows] / ctx.temperature)[:, None]).to(weight.dtype)
            if for_hidden is not None:
                torch.mm(slopes, weight, out=for_hidden[rows])
            if for_weight is not None:
                for_weight.addmm_(slopes.T, hidden[rows])
        return for_hidden, for_weight, None, None, None


def _chunks(num_tokens: int, num_entries: int) -> list[slice]:
    size = max(1, CHUNK_ENTRIES // num_entries)
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _logits(
    hidden: Tensor, weight: Tensor, temperature: float, is_kept: Tensor | None, rows: slice
) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight).float()
    if temperature != 1.0:
        logits = logits / temperature
    return logits if is_kept is None else logits.masked_fill(~is_kept[rows], -torch.inf)
