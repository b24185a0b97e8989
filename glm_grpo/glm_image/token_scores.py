"""Log-probabilities of tokens from hidden states, without logits of all tokens at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

CHUNK_ENTRIES = 2**24
"""Logits made at once: 64 MB in fp32."""

TRAINED_CHUNK_ENTRIES = 2**25
"""The same for a trained head, where fewer chunks are less to compute again: 1280 tokens of the
published codebook are one chunk."""


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
    head: Float[Tensor, "H D"],
    token_ids: Int64[Tensor, "*N"],
    *,
    codebook_size: int,
    temperature: float,
    is_kept: Bool[Tensor, "*N V"] | None = None,
) -> TokenScores:
    """Log-probability and entropy of each token under softmax(hidden @ head.T / temperature).

    Equals the plain computation to rounding. Logits exist for at most `CHUNK_ENTRIES / V` tokens
    at a time (`TRAINED_CHUNK_ENTRIES / V` where the head is trained), so memory does not grow with
    the vocabulary. Where the head is frozen, the slope of each log-probability is kept, which is as
    large as its hidden state; where it is trained, logits are computed again in the backward pass,
    but for the last chunk's.
    Source: Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models
    (arXiv 2411.09009), section 4, without its kernels; gradients made in the forward pass, Hsu et
    al. 2024, Liger Kernel (arXiv 2410.10989), section 3.2.

    Args:
        hidden_states: Of the last layer, normalised.
        head: Its weight; the gradient is of all rows, so that no copy of it is made.
        token_ids: In 0..V-1.
        codebook_size: V, the entries that can be drawn: the head's first.
        temperature: > 0.
        is_kept: Entries that truncation left; None for all.
    """
    log_probs, entropy = _Score.apply(
        hidden_states.flatten(0, -2),
        head,
        token_ids.flatten(),
        codebook_size,
        temperature,
        None if is_kept is None else is_kept.flatten(0, -2),
    )
    return TokenScores(log_probs.view(token_ids.shape), entropy.view(token_ids.shape))


@torch.no_grad()
def token_log_probs(
    hidden_states: Float[Tensor, "*N D"],
    head: Float[Tensor, "H D"],
    token_ids: Int64[Tensor, "*N"],
    *,
    codebook_size: int,
    temperature: float,
    is_kept: Bool[Tensor, "*N V"] | None = None,
) -> Float32[Tensor, "*N"]:
    """The log-probabilities of `score_tokens` alone, without gradient; arguments as there."""
    flat, tokens = hidden_states.flatten(0, -2), token_ids.flatten()
    kept = None if is_kept is None else is_kept.flatten(0, -2)
    chunks = _Chunks(flat, head[:codebook_size], temperature, kept, CHUNK_ENTRIES)
    log_probs = torch.empty(len(flat), dtype=torch.float32, device=flat.device)
    for rows in chunks.rows():
        log_probs[rows] = _at(chunks.log_probs(rows), tokens[rows])
    return log_probs.view(token_ids.shape)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        token_ids: Tensor,
        codebook_size: int,
        temperature: float,
        is_kept: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        weight = head[:codebook_size]
        needs_head = ctx.needs_input_grad[1]
        entries = TRAINED_CHUNK_ENTRIES if needs_head else CHUNK_ENTRIES
        chunks = _Chunks(hidden, weight, temperature, is_kept, entries)
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        slopes = torch.empty_like(hidden)
        by_logits = None
        for rows in chunks.rows():
            every = chunks.log_probs(rows)
            log_probs[rows] = _at(every, token_ids[rows])
            by_logits = _minus_one_hot(every.exp_(), token_ids[rows]).to(weight.dtype)
            torch.mm(by_logits, weight, out=slopes[rows])
        # d log p(token) / d hidden = the token's row of the head - the expected row.
        slopes *= -1.0 / temperature
        # The token's logit less the expected one, and log of the sum of masses less the token's.
        entropy = torch.linalg.vecdot(hidden.float(), slopes.float()) - log_probs
        if needs_head:
            # The view keeps a head alive that was gathered for the forward pass alone.
            ctx.save_for_backward(slopes, hidden, weight, token_ids, is_kept, by_logits)
        else:
            ctx.save_for_backward(slopes)
        ctx.head_size, ctx.temperature = len(head), temperature
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        slopes, *rest = ctx.saved_tensors
        for_hidden = slopes * gradient[:, None].to(slopes.dtype) if needs_hidden else None
        if not needs_head:
            return (for_hidden, *[None] * 5)
        hidden, weight, token_ids, is_kept, last = rest
        chunks = _Chunks(hidden, weight, ctx.temperature, is_kept, TRAINED_CHUNK_ENTRIES)
        # d log p(token) / d logits = one_hot(token) - p.
        weighed = (hidden * (-gradient / ctx.temperature)[:, None]).to(weight.dtype)
        for_head = weight.new_zeros(ctx.head_size, weight.shape[1])
        for rows in chunks.rows():
            if rows.stop == len(hidden):
                by_logits = last
            else:
                probs = chunks.log_probs(rows).exp_()
                by_logits = _minus_one_hot(probs, token_ids[rows]).to(weight.dtype)
            for_head[: len(weight)].addmm_(by_logits.T, weighed[rows])
        return (for_hidden, for_head, *[None] * 4)


def _at(every: Tensor, token_ids: Tensor) -> Tensor:
    """Of values [N, V] those of the tokens [N]."""
    return every.gather(-1, token_ids[:, None]).squeeze(-1)


def _minus_one_hot(probs: Tensor, token_ids: Tensor) -> Tensor:
    """Probabilities [N, V] less 1 at each token's entry, in place."""
    return probs.scatter_add_(-1, token_ids[:, None], probs.new_full((len(probs), 1), -1.0))


class _Chunks:
    """Logits of some tokens at a time, in memory that is taken once.

    Taking and returning it for every chunk costs more time than what is computed in it.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        temperature: float,
        is_kept: Tensor | None,
        entries: int,
    ) -> None:
        self._hidden, self._weight = hidden, weight
        self._temperature, self._is_kept = temperature, is_kept
        largest = max(1, entries // len(weight))
        # Of one size: a product of few rows takes longer per row.
        num_chunks = max(1, math.ceil(len(hidden) / largest))
        self._size = max(1, math.ceil(len(hidden) / num_chunks))
        self._room: Tensor | None = None

    def rows(self) -> list[slice]:
        """Of every chunk."""
        num_tokens = len(self._hidden)
        starts = range(0, num_tokens, self._size)
        return [slice(start, min(start + self._size, num_tokens)) for start in starts]

    def log_probs(self, rows: slice) -> Tensor:
        """Of all entries, in fp32; until the next call."""
        if self._room is None:
            self._room = self._hidden.new_empty(
                self._size, len(self._weight), dtype=self._weight.dtype
            )
        room = self._room[: rows.stop - rows.start]
        logits = torch.mm(self._hidden[rows], self._weight.T, out=room).float()
        if self._temperature != 1.0:
            logits = logits.div_(self._temperature)
        if self._is_kept is not None:
            logits = logits.masked_fill_(~self._is_kept[rows], -torch.inf)
        # One row after the other is read and written while it is in a cache.
        return torch.log_softmax(logits, dim=-1, out=logits)
