"""Compute the policy part of the loss per token, with one function for each kind of loss.

`chosen_surrogate` calls the one that the options choose; the others see only tensors and numbers.

N sequences have T tokens. r is the token ratio exp(log_prob - old_log_prob), s the sequence ratio
exp(mean over tokens of log r), A the advantage of the sequence or, with credit by place, of the
token. In the first update of a rollout r and s are 1, and all kinds have the same gradient, that of
-A log_prob.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from glm_grpo.config.losses import CispoLoss, ClippedLoss, GmpoLoss, SapoLoss, SurrogateLoss


@dataclass(frozen=True)
class Surrogate:
    """The policy part of the loss.

    Attributes:
        loss: Loss of each token, to be minimised; carries the gradient. A kind with a sequence
            ratio has the same loss at all tokens of a sequence.
        ratio: Token ratio, > 0; without gradient.
        is_clipped: True where a bound acts, so that the token has no gradient (in `cispo`: where
            its weight is capped). None for kinds without a bound.
    """

    loss: Float32[Tensor, "N T"]
    ratio: Float32[Tensor, "N T"]
    is_clipped: Bool[Tensor, "N T"] | None


def chosen_surrogate(
    options: SurrogateLoss,
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    advantages: Float32[Tensor, "N columns"],
    token_weights: Float32[Tensor, "N T"] | None = None,
) -> Surrogate:
    """Surrogate of the kind that the options choose.

    Args:
        log_probs: Log-probs under the policy being trained, with gradient.
        old_log_probs: Log-probs that ratios are relative to.
        advantages: One per sequence, or one per token.
        token_weights: Weight of each token, such as 0 or 1 of `top_entropy_weights`; None: all 1.
    """
    tokens = (log_probs, old_log_probs, advantages)
    match options:
        case ClippedLoss():
            low, high, cap = options.clip_low, options.clip_high, options.two_sided_clip
            if options.ratio_level == "sequence":
                return sequence_surrogate(
                    *tokens,
                    clip_low=low,
                    clip_high=high,
                    two_sided_clip=cap,
                    token_weights=token_weights,
                )
            found = clipped_surrogate(*tokens, clip_low=low, clip_high=high, two_sided_clip=cap)
        case CispoLoss():
            found = cispo_surrogate(*tokens, max_ratio=options.max_ratio)
        case SapoLoss():
            found = sapo_surrogate(
                *tokens, tau_positive=options.tau_positive, tau_negative=options.tau_negative
            )
        case GmpoLoss():
            return gmpo_surrogate(*tokens, log_clip=options.log_clip, token_weights=token_weights)
        case _:
            assert_never(options)
    return replace(found, loss=_weighted(found.loss, token_weights))


def clipped_surrogate(
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    advantages: Float32[Tensor, "N columns"],
    *,
    clip_low: float,
    clip_high: float,
    two_sided_clip: float | None = None,
) -> Surrogate:
    """PPO's clipped objective, as a loss.

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_prob - old_log_prob).
    The bound acts where the ratio has already moved in the advantage's direction: above for A > 0,
    below for A < 0. On the other side the token keeps its gradient and is moved back. With
    `two_sided_clip` the first r is min(r, two_sided_clip): for A < 0, a token whose ratio rose
    above it has no gradient either; without it, its gradient grows with the ratio.

    Source: PPO (arXiv 1707.06347), equation 7; separate bounds: DAPO (arXiv 2503.14476),
    section 3.1; the cap: INTELLECT-2 (arXiv 2505.07291), section 3.4; one advantage for all tokens
    of an image: DeepSeekMath (arXiv 2402.03300).

    Args:
        log_probs: Log-probs under the policy being trained, with gradient.
        old_log_probs: Log-probs that ratios are relative to.
        advantages: One per sequence (1 column), or one per token (T columns).
        clip_low: The ratio is clipped below 1 - clip_low, in (0, 1).
        clip_high: The ratio is clipped above 1 + clip_high, > 0.
        two_sided_clip: Cap of the ratio for A < 0, above 1 + clip_high; None: no cap.
    """
    ratio = torch.exp(log_probs - old_log_probs.detach())
    clipped = _clip(ratio, advantages, clip_low, clip_high, two_sided_clip)
    return Surrogate(clipped.loss, ratio.detach(), clipped.is_clipped)


def sequence_surrogate(
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    advantages: Float32[Tensor, "N columns"],
    *,
    clip_low: float,
    clip_high: float,
    two_sided_clip: float | None = None,
    token_weights: Float32[Tensor, "N T"] | None = None,
) -> Surrogate:
    """Like `clipped_surrogate`, with the sequence ratio s instead of each token's ratio.

    Each image is clipped as a whole. In later updates of a rollout of the embedded model, log s has
    a standard deviation of 0.002 to 0.03 between images (`ratio/sequence_std`), so bounds should be
    about 0.02 to 0.03; the 3e-4 that is usual for text clips nearly every image.

    Every token has the same ratio, with the gradient of its own log-prob alone: over an image, the
    gradient is that of the ratio, and a token can be weighted by itself.

    Source: GSPO (arXiv 2507.18071), equations 5 to 7; advantages of tokens: its section 4.3.

    Args:
        log_probs: Log-probs under the policy being trained, with gradient.
        old_log_probs: Log-probs that ratios are relative to.
        advantages: One per sequence (1 column), or one per token (T columns).
        clip_low: As in `clipped_surrogate`.
        clip_high: As in `clipped_surrogate`.
        two_sided_clip: As in `clipped_surrogate`.
        token_weights: Weight of each token in the mean of log r over all T; None: all 1.
    """
    log_ratio = log_probs - old_log_probs.detach()
    ratio = torch.exp(_weighted(log_ratio, token_weights).mean(dim=1, keepdim=True))
    own = _weighted(log_probs - log_probs.detach(), token_weights)
    ratio = ratio.detach() * torch.exp(own)
    clipped = _clip(ratio, advantages, clip_low, clip_high, two_sided_clip)
    return Surrogate(clipped.loss, log_ratio.detach().exp(), clipped.is_clipped)


def cispo_surrogate(
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    advantages: Float32[Tensor, "N columns"],
    *,
    max_ratio: float,
) -> Surrogate:
    """Policy gradient with a capped importance weight: -min(r, max_ratio) A log_prob.

    The weight has no gradient, so every token keeps its own, however large its ratio.

    Source: CISPO in MiniMax-M1 (arXiv 2506.13585), equations 4 and 5. The cap applies to the ratio
    itself, like TRL's `epsilon_high`; verl's cap is 1 + its bound.

    Args:
        log_probs: Log-probs under the policy being trained, with gradient.
        old_log_probs: Log-probs that ratios are relative to.
        advantages: One per sequence (1 column), or one per token (T columns).
        max_ratio: Largest weight, >= 1.
    """
    ratio = torch.exp(log_probs.detach() - old_log_probs.detach())
    loss = -ratio.clamp(max=max_ratio) * advantages * log_probs
    return Surrogate(loss, ratio, is_clipped=ratio > max_ratio)


def sapo_surrogate(
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    advantages: Float32[Tensor, "N columns"],
    *,
    tau_positive: float,
    tau_negative: float,
) -> Surrogate:
    """Soft gate instead of the clip: -A sigmoid(tau (r - 1)) 4 / tau.

    The slope decreases smoothly on both sides of r = 1, faster with larger tau; at r = 1 it equals
    that of -A r.

    Source: SAPO (arXiv 2511.20347), equations 5 and 6.

    Args:
        log_probs: Log-probs under the policy being trained, with gradient.
        old_log_probs: Log-probs that ratios are relative to.
        advantages: One per sequence (1 column), or one per token (T columns).
        tau_positive: tau for A > 0, > 0.
        tau_negative: tau for A <= 0, > 0.
    """
    ratio = torch.exp(log_probs - old_log_probs.detach())
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    loss = -advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return Surrogate(loss, ratio.detach(), is_clipped=None)


def gmpo_surrogate(
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    advantages: Float32[Tensor, "N 1"],
    *,
    log_clip: float,
    token_weights: Float32[Tensor, "N T"] | None = None,
) -> Surrogate:
    """Geometric mean of clipped token ratios: -A exp(mean over tokens of l).

    l = sgn(A) min(sgn(A) log r, sgn(A) clip(log r, -log_clip, log_clip)). Single outliers move the
    geometric mean less than the arithmetic one, so the bound can be wide.

    Source: GMPO (arXiv 2507.20673), equation 4, with its bounds (e^-0.4, e^0.4).

    Args:
        log_probs: Log-probs under the policy being trained, with gradient.
        old_log_probs: Log-probs that ratios are relative to.
        advantages: One per sequence: the sign of a sequence decides how it is clipped.
        log_clip: Bound on |log r|, > 0.
        token_weights: Weight of each token in the mean over all T; None: all 1.
    """
    log_ratio = log_probs - old_log_probs.detach()
    sign = advantages.sign()
    clipped = log_ratio.clamp(-log_clip, log_clip)
    bounded = sign * torch.minimum(sign * log_ratio, sign * clipped)
    mean = torch.exp(_weighted(bounded, token_weights).mean(dim=1, keepdim=True))
    # As in `sequence_surrogate`, each token has the gradient of its own log-prob alone.
    own = _weighted(bounded - bounded.detach(), token_weights)
    loss = -advantages * mean.detach() * torch.exp(own)
    is_clipped = sign * log_ratio > log_clip
    return Surrogate(loss, log_ratio.detach().exp(), is_clipped)


@dataclass(frozen=True)
class _Clipped:
    loss: Float32[Tensor, "N _"]
    is_clipped: Bool[Tensor, "N _"]


def _clip(
    ratio: Float32[Tensor, "N _"],
    weight: Float32[Tensor, "N _"],
    clip_low: float,
    clip_high: float,
    two_sided_clip: float | None,
) -> _Clipped:
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    capped = ratio if two_sided_clip is None else ratio.clamp(max=two_sided_clip)
    loss = -torch.minimum(capped * weight, clipped * weight)
    is_above = (ratio > 1.0 + clip_high) & (weight > 0)
    is_below = (ratio < 1.0 - clip_low) & (weight < 0)
    is_clipped = is_above | is_below
    if two_sided_clip is not None:
        is_clipped = is_clipped | ((ratio > two_sided_clip) & (weight < 0))
    return _Clipped(loss, is_clipped)


def _weighted(
    values: Float32[Tensor, "N T"], weights: Float32[Tensor, "N T"] | None
) -> Float32[Tensor, "N T"]:
    return values if weights is None else values * weights
