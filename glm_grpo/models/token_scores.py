"""Log-probabilities of tokens from hidden states, without logits of all tokens at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

_LOWEST = -1e4
"""Replaces -inf where a product with 0 must be 0; exp(-1e4) is 0 in fp32."""

CHUNK_ENTRIES = 2**24
"""Logits that exist at once: 64 MB in fp32."""

TRAINED_CHUNK_ENTRIES = 2 * CHUNK_ENTRIES
"""The same for a trained head, where fewer chunks mean less to recompute: 1280 tokens of the
published codebook are one chunk."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of drawn tokens under a distribution.

    Attributes:
        log_probs: Natural logarithm of each token's probability; with gradient.
        entropy: Entropy of the distribution at each token, nats; with gradient on request.
        outside_codebook: Probability that the head's other rows would have if they could be drawn
            too, beside the entries that truncation kept, in [0, 1); without gradient.
    """

    log_probs: Float32[Tensor, "*N"]
    entropy: Float32[Tensor, "*N"]
    outside_codebook: Float32[Tensor, "*N"]


def score_tokens(
    hidden_states: Float[Tensor, "*N D"],
    head: Float[Tensor, "H D"],
    token_ids: Int64[Tensor, "*N"],
    *,
    bias: Float[Tensor, " H"] | None = None,
    codebook_size: int,
    temperature: float,
    sampling_mask: Bool[Tensor, "*N V"] | None = None,
    has_entropy_gradient: bool = False,
) -> TokenScores:
    """Log-probability and entropy of each token under softmax(hidden @ head.T / temperature).

    Equals the plain computation to rounding. Logits exist for at most `CHUNK_ENTRIES / V` tokens
    at a time (`TRAINED_CHUNK_ENTRIES / V` if the head is trained), so memory does not grow with
    the vocabulary. With a frozen head, the slope of each log-probability is stored, which has the
    size of its hidden state; with a trained head, the backward pass recomputes all logits except
    those of the last chunk.
    Source: Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models
    (arXiv 2411.09009), section 4, without its kernels; gradients made in the forward pass, Hsu et
    al. 2024, Liger Kernel (arXiv 2410.10989), section 3.2.

    Args:
        hidden_states: Output of the last layer, normalised.
        head: Weight of the head; its gradient covers all rows, so that no copy is needed.
        token_ids: In 0..V-1.
        bias: Added to the logits before they are divided; frozen. None: no bias.
        codebook_size: V, the number of the head's first rows that can be drawn.
        temperature: > 0.
        sampling_mask: Entries that truncation kept; None: all.
        has_entropy_gradient: Give the entropy a gradient too. A frozen head then stores one more
            slope per token; a trained one recomputes all logits.
    """
    scores = _Score.apply(
        hidden_states.flatten(0, -2),
        head,
        token_ids.flatten(),
        bias,
        codebook_size,
        temperature,
        None if sampling_mask is None else sampling_mask.flatten(0, -2),
        has_entropy_gradient,
    )
    return TokenScores(*(each.view(token_ids.shape) for each in scores))


@torch.no_grad()
def token_log_probs(
    hidden_states: Float[Tensor, "*N D"],
    head: Float[Tensor, "H D"],
    token_ids: Int64[Tensor, "*N"],
    *,
    bias: Float[Tensor, " H"] | None = None,
    codebook_size: int,
    temperature: float,
    sampling_mask: Bool[Tensor, "*N V"] | None = None,
) -> Float32[Tensor, "*N"]:
    """Only the log-probabilities of `score_tokens`, without gradient; arguments as there."""
    flat, tokens = hidden_states.flatten(0, -2), token_ids.flatten()
    kept = None if sampling_mask is None else sampling_mask.flatten(0, -2)
    own = None if bias is None else bias[:codebook_size]
    chunks = _Chunks(flat, head[:codebook_size], own, temperature, kept, CHUNK_ENTRIES)
    log_probs = torch.empty(len(flat), dtype=torch.float32, device=flat.device)
    for rows in chunks.rows():
        logits = chunks.logits(rows)
        log_probs[rows] = logits.gather(-1, tokens[rows, None]).squeeze(-1)
        highest = logits.amax(dim=-1)
        log_probs[rows] -= logits.sub_(highest[:, None]).exp_().sum(dim=-1).log() + highest
    return log_probs.view(token_ids.shape)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        token_ids: Tensor,
        bias: Tensor | None,
        codebook_size: int,
        temperature: float,
        sampling_mask: Tensor | None,
        has_entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight, others = head[:codebook_size], head[codebook_size:]
        own_bias = None if bias is None else bias[:codebook_size]
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        entries = TRAINED_CHUNK_ENTRIES if needs_head else CHUNK_ENTRIES
        chunks = _Chunks(hidden, weight, own_bias, temperature, sampling_mask, entries)
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, log_sums = torch.empty_like(log_probs), torch.empty_like(log_probs)
        outside = torch.empty_like(log_probs)
        slopes = torch.empty_like(hidden) if needs_hidden and not needs_head else None
        entropy_slopes = None
        if slopes is not None and has_entropy_gradient:
            entropy_slopes = torch.empty_like(hidden)
        last = None
        for rows in chunks.rows():
            logits = chunks.logits(rows)
            log_probs[rows] = logits.gather(-1, token_ids[rows, None]).squeeze(-1)
            highest = logits.amax(dim=-1, keepdim=True)
            logits.sub_(highest)
            masses = chunks.exp(logits)
            total = masses.sum(dim=-1)
            log_sums[rows] = highest.squeeze(-1) + total.log()
            # A separate product, so that the codebook's logits stay equal to the bit.
            other_logits = torch.mm(hidden[rows], others.T).float()
            if bias is not None:
                other_logits += bias[codebook_size:]
            other_logits /= temperature
            outside[rows] = torch.sigmoid(other_logits.logsumexp(dim=-1) - log_sums[rows])
            # An entry of mass 0 adds nothing, even if its logit is -inf.
            expected = torch.bmm(masses[:, None], logits.clamp_(min=_LOWEST)[..., None])
            entropy[rows] = total.log() - expected.flatten() / total
            if entropy_slopes is not None:
                by_logits = _entropy_slope(
                    masses / total[:, None], logits - total.log()[:, None], entropy[rows]
                )
                by_logits = by_logits.div_(temperature).to(weight.dtype)
                torch.mm(by_logits, weight, out=entropy_slopes[rows])
            if slopes is not None:
                # d log p(token) / d hidden = the token's row of the head - the expected row.
                masses.mul_(-1.0 / (total * temperature)[:, None])
                own = weight[token_ids[rows]]
                minus_p = masses.to(weight.dtype)
                torch.addmm(own, minus_p, weight, beta=1.0 / temperature, out=slopes[rows])
            elif needs_head and not has_entropy_gradient and rows.stop == len(hidden):
                # The backward pass then needs the memory of two chunks, as this one does.
                last = _minus_one_hot(masses.div_(total[:, None]), token_ids[rows])
        log_probs -= log_sums
        if slopes is None:
            # The view keeps alive a head that was gathered only for the forward pass.
            ctx.save_for_backward(
                hidden, weight, token_ids, own_bias, log_sums, sampling_mask, last, entropy
            )
        else:
            ctx.save_for_backward(slopes, entropy_slopes)
        ctx.head_size, ctx.temperature = len(head), temperature
        ctx.has_entropy_gradient = has_entropy_gradient
        ctx.mark_non_differentiable(*([] if has_entropy_gradient else [entropy]), outside)
        return log_probs, entropy, outside

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, for_entropy: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        if not needs_head:
            slopes, entropy_slopes = ctx.saved_tensors
            scaled_slopes = _scaled(slopes, gradient)
            if entropy_slopes is not None:
                scaled_slopes += _scaled(entropy_slopes, for_entropy)
            return (scaled_slopes, *[None] * 7)
        hidden, weight, token_ids, bias, log_sums, sampling_mask, last, entropy = ctx.saved_tensors
        chunks = _Chunks(
            hidden, weight, bias, ctx.temperature, sampling_mask, TRAINED_CHUNK_ENTRIES
        )
        for_hidden = torch.empty_like(hidden) if needs_hidden else None
        for_head = weight.new_zeros(ctx.head_size, weight.shape[1])
        # d log p(token) / d logits = one_hot(token) - p.
        factor = torch.ones_like(gradient) if ctx.has_entropy_gradient else gradient
        scaled = (-factor / ctx.temperature)[:, None]
        weighted = (hidden * scaled).to(weight.dtype)
        for rows in chunks.rows():
            if ctx.has_entropy_gradient:
                log_p = chunks.logits(rows).sub_(log_sums[rows, None])
                slope = _entropy_slope(log_p.exp(), log_p.clamp(min=_LOWEST), entropy[rows])
                by_logits = _minus_one_hot(log_p.exp_(), token_ids[rows])
                by_logits *= gradient[rows, None]
                by_logits -= slope * for_entropy[rows, None]
            elif rows.stop == len(hidden):
                by_logits = last
            else:
                masses = chunks.logits(rows).sub_(log_sums[rows, None]).exp_()
                by_logits = _minus_one_hot(masses, token_ids[rows])
            by_logits = by_logits.to(weight.dtype)
            if for_hidden is not None:
                torch.mm(by_logits, weight, out=for_hidden[rows])
            for_head[: len(weight)].addmm_(by_logits.T, weighted[rows])
        if for_hidden is not None:
            for_hidden *= scaled
        return (for_hidden, for_head, *[None] * 6)


def _scaled(slopes: Tensor, gradient: Tensor) -> Tensor:
    """Slopes [N, D] times a gradient per token, rounded to the slopes' dtype only once.

    A gradient alone may be outside the range of float16 where the product is inside.
    """
    return torch.mul(slopes, gradient[:, None], out=torch.empty_like(slopes))


def _entropy_slope(p: Tensor, log_p: Tensor, entropy: Tensor) -> Tensor:
    """Derivative of the entropy by the logits: -p (log p + entropy)."""
    return p.mul(log_p + entropy[:, None]).neg_()


def _minus_one_hot(masses: Tensor, token_ids: Tensor) -> Tensor:
    """Masses [N, V] less 1 at each token's entry, in place."""
    return masses.scatter_add_(-1, token_ids[:, None], masses.new_full((len(masses), 1), -1.0))


class _Chunks:
    """Logits of some tokens at a time, in memory that is allocated once.

    Allocating it for every chunk takes longer than the computation.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        sampling_mask: Tensor | None,
        entries: int,
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._temperature, self._sampling_mask = temperature, sampling_mask
        largest = max(1, entries // len(weight))
        # Of equal size, because a product of few rows takes longer per row.
        num_chunks = max(1, math.ceil(len(hidden) / largest))
        self._size = max(1, math.ceil(len(hidden) / num_chunks))
        self._logits: Tensor | None = None
        self._masses: Tensor | None = None

    def rows(self) -> list[slice]:
        """Rows of each chunk."""
        num_tokens = len(self._hidden)
        starts = range(0, num_tokens, self._size)
        return [slice(start, min(start + self._size, num_tokens)) for start in starts]

    def logits(self, rows: slice) -> Tensor:
        """Logits in fp32, valid until the next call."""
        if self._logits is None:
            self._logits = self._room(self._weight.dtype)
        room = self._logits[: rows.stop - rows.start]
        logits = torch.mm(self._hidden[rows], self._weight.T, out=room).float()
        if self._bias is not None:
            logits = logits.add_(self._bias)
        if self._temperature != 1.0:
            logits = logits.div_(self._temperature)
        if self._sampling_mask is not None:
            logits = logits.masked_fill_(~self._sampling_mask[rows], -torch.inf)
        return logits

    def exp(self, logits: Tensor) -> Tensor:
        """Exponentials of logits, valid until the next call."""
        if self._masses is None:
            self._masses = self._room(torch.float32)
        return torch.exp(logits, out=self._masses[: len(logits)])

    def _room(self, dtype: torch.dtype) -> Tensor:
        return self._hidden.new_empty(self._size, len(self._weight), dtype=dtype)
