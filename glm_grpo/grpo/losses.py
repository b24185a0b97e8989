"""Compute the loss of GRPO from its parts.

N sequences have T tokens, all of them valid: images of one size have the same length, so there is
no padding mask, and a mean over tokens is the mean of the sequences' means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

import torch
from jaxtyping import Float32, Shaped
from torch import Tensor

from glm_grpo.config.losses import (
    AnyLoss,
    CustomLoss,
    ImportanceWeights,
    KlEstimator,
    SurrogateLoss,
)
from glm_grpo.errors import ConfigError
from glm_grpo.grpo.surrogates import chosen_surrogate
from rewards.process_defaults import defaults_kept

_FAR = 0.2
"""Tokens whose importance ratio differs from 1 by more are counted: PPO's usual clip range."""


@dataclass(frozen=True)
class LossInputs:
    """Input of a loss for N sequences.

    Attributes:
        log_probs: Log-probs under the policy being trained, with gradient.
        old_log_probs: Log-probs under the policy that the updates of the rollout begin with, by the
            same computation: the ratio's denominator. In the first update they equal `log_probs`.
        reference_log_probs: Log-probs under the reference policy; None if nothing weighs them.
        advantages: Factor of each token in the policy loss: T columns with credit by place,
            otherwise one, the advantage of the sequence.
        sampling_log_probs: Log-probs as recorded by the sampler, which rounds differently and may
            have had older weights; None: `old_log_probs`.
        importance_weights: Factor of each token in the policy loss, which corrects for the sampler;
            None: all 1.
        entropy: Entropy of the policy's distribution at each token, nats; with gradient if
            `loss.entropy_coef` is not 0. None: not measured.
        num_preview: Number of preview tokens at the start of each sequence; 0 if there is no
            preview.
    """

    log_probs: Float32[Tensor, "N T"]
    old_log_probs: Float32[Tensor, "N T"]
    reference_log_probs: Float32[Tensor, "N T"] | None
    advantages: Float32[Tensor, "N columns"]
    sampling_log_probs: Float32[Tensor, "N T"] | None = None
    importance_weights: Float32[Tensor, "N T"] | None = None
    entropy: Float32[Tensor, "N T"] | None = None
    num_preview: int = 0


@dataclass(frozen=True)
class LossOutput:
    """A loss and its metrics.

    Attributes:
        total: Scalar to minimise, with gradient: a mean over tokens, so that micro-batches weighted
            by their fraction of the tokens add up to the batch.
        metrics: Metrics by the name they are stored under; a scalar, or one value per token. The
            mean over the tokens of all replayed sequences is reported. `ratio/mean_square` becomes
            `ratio/effective_sample_size`; `ratio/sequence_log` and its `_square` become
            `ratio/sequence_std`.
        terms: Terms that add up to the total, by the name they are stored under: scalars, in which
            sequences that `train.skip_zero_std` skips count as 0. A custom loss leaves them out.
    """

    total: Tensor
    metrics: Mapping[str, Shaped[Tensor, "..."]]
    terms: Mapping[str, Tensor] = field(default_factory=dict)


def mean_surrogate(inputs: LossInputs, options: SurrogateLoss) -> LossOutput:
    """Mean surrogate over all tokens, each times its importance weight.

    Ratios, their clip and their metrics are relative to the policy that the updates begin with.
    """
    quantile, token_weights = options.top_entropy_quantile, None
    if quantile is not None and quantile < 1.0:
        token_weights = top_entropy_weights(inputs, quantile)
    surrogate = chosen_surrogate(
        options,
        inputs.log_probs,
        inputs.old_log_probs,
        inputs.advantages,
        token_weights,
    )
    loss, ratio = surrogate.loss, surrogate.ratio.double()
    if inputs.importance_weights is not None:
        loss = loss * inputs.importance_weights
    log_ratio = (inputs.log_probs - inputs.old_log_probs).detach().double()
    if token_weights is not None:
        log_ratio = log_ratio * token_weights
    sequence_log = log_ratio.mean(dim=1)
    metrics = {
        "ratio/mean": ratio,
        "ratio/mean_square": ratio.square(),
        "ratio/sequence_log": sequence_log,
        "ratio/sequence_log_square": sequence_log.square(),
    }
    if surrogate.is_clipped is not None:
        metrics["ratio/clip_fraction"] = surrogate.is_clipped
    return LossOutput(loss.mean(), metrics)


def top_entropy_weights(inputs: LossInputs, quantile: float) -> Float32[Tensor, "N T"]:
    """1 at the highest-entropy tokens of each sequence (at least one), 0 at the others.

    Selected per sequence rather than per batch, so that the result does not depend on micro-batches
    and processes. Source: Wang et al. 2025 (arXiv 2506.01939), equation 5.
    """
    if inputs.entropy is None:
        raise ValueError("top_entropy_quantile without entropy: pass the entropy of the replay")
    entropy = inputs.entropy.detach()
    highest = entropy.topk(max(1, math.ceil(quantile * entropy.shape[1])), dim=1).indices
    return torch.zeros_like(entropy).scatter(1, highest, 1.0)


def kl_estimate(
    log_probs: Float32[Tensor, "*tokens"],
    reference_log_probs: Float32[Tensor, "*tokens"],
    *,
    estimator: KlEstimator,
) -> Float32[Tensor, "*tokens"]:
    """Estimate KL(policy || reference) from tokens drawn from the policy.

    With d = reference_log_probs - log_probs:

    - k1 = -d: unbiased, of either sign. As a *loss* it has no effect on average, because the
      expectation of its gradient is 0 on-policy. It belongs in the reward (`reference_penalty`).
    - k2 = d^2 / 2: biased, >= 0; the expectation of its gradient is that of the KL.
    - k3 = exp(d) - d - 1: unbiased, >= 0, the one in the GRPO paper; the expectation of its
      gradient is that of KL(reference || policy), which is the same to second order.

    Source: Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html; k3 in
    the loss: DeepSeekMath (arXiv 2402.03300), equation 4; the gradients: Tang and Munos
    (arXiv 2506.09477).

    Args:
        log_probs: Log-probs (natural) under the distribution the tokens come from, finite.
        reference_log_probs: Log-probs of the same tokens under the other distribution.
        estimator: One of the three above.

    Returns:
        One estimate per token, in nats.
    """
    difference = reference_log_probs - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        # expm1 keeps the digits that exp(d) - 1 loses near d = 0, where healthy runs are; the clamp
        # removes remaining rounding errors, which could be one unit below 0.
        return (torch.expm1(difference) - difference).clamp(min=0.0)
    assert_never(estimator)


def corrected_kl_estimate(
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    reference_log_probs: Float32[Tensor, "N T"],
    importance_weights: Float32[Tensor, "N T"] | None = None,
) -> Float32[Tensor, "N T"]:
    """Estimate KL(policy || reference) from tokens that another policy sampled: r * k3.

    r = weight * exp(log_prob - old_log_prob) is the ratio to the policy that sampled, with its
    gradient, as long as the weight is not limited. Given the tokens before it, estimate and
    gradient of a token are unbiased for every sampling policy that can draw all tokens, so also in
    the second and later updates of a rollout: the expectation of r * k3 under the sampling policy
    is that of k3 under the policy. The tokens before it still come from the sampling policy, and
    its effect on the KL of later tokens is left out. The gradient of the KL of whole images is
    therefore another one: with four dependent tokens, by enumeration, the difference was .17 to .26
    of it after a small step of the policy, and .35 to .81 after a large one. `reference_penalty`
    has that gradient, in the first update. The gradient of one token is r * (log_prob -
    reference_log_prob), r times k2's. k3's own is 1 - exp(reference_log_prob - log_prob), which a
    single token that became unlikely blows up.

    Without the weight, the ratio would treat the tokens as samples of the policy that the updates
    begin with. The limit bounds the variance as it does in the surrogate: both parts of the loss
    weight the same tokens alike, and a masked token is masked in both.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1; TRL's `use_bias_correction_kl`.

    Args:
        log_probs: Log-probs under the policy being trained, with gradient.
        old_log_probs: As in `LossInputs`.
        reference_log_probs: Log-probs under the reference policy.
        importance_weights: As in `LossInputs`.

    Returns:
        One estimate per token, in nats, >= 0.
    """
    ratio = torch.exp(log_probs - old_log_probs.detach())
    if importance_weights is not None:
        ratio = ratio * importance_weights
    return ratio * kl_estimate(log_probs, reference_log_probs, estimator="k3")


def custom_loss(inputs: LossInputs, options: CustomLoss) -> LossOutput:
    """Result of the user's function."""
    function = options.load()
    with defaults_kept(f"loss.function = {options.function}"):
        found = function(inputs)
    if not isinstance(found, LossOutput) or not _is_loss(found.total):
        raise ConfigError(
            f"loss.function = {options.function}: returned {_described(found)}; it must return "
            "glm_grpo.grpo.losses.LossOutput(total, metrics) whose total is one number with a "
            "gradient to inputs.log_probs"
        )
    for name, value in found.metrics.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"loss.function = {options.function}: metric {name!r} is a "
                f"{type(value).__name__}; it must be a tensor, a scalar or one value per token"
            )
    return found


def _is_loss(total: object) -> bool:
    return isinstance(total, Tensor) and total.ndim == 0 and total.requires_grad


def _described(found: object) -> str:
    if not isinstance(found, LossOutput):
        return f"a {type(found).__name__}"
    shape = tuple(getattr(found.total, "shape", ()))
    return f"a total of shape {shape}" if shape else "a total without gradient"


def grpo_loss(inputs: LossInputs, options: AnyLoss) -> LossOutput:
    """Policy loss, plus KL to the reference and to the sampling policy, minus entropy.

    total = policy loss + kl_coef * mean(KL(policy || reference))
            + kl_behaviour_coef * mean(KL(sampling policy || policy))
            - entropy_coef * mean(entropy)

    Tokens were drawn from the sampling policy, so the second KL is unbiased at every update. With
    `k3_corrected` the first is unbiased at every update for each token, given those before it; with
    the other estimators only while policy and sampling policy agree, as in the paper. Every mean
    runs over all N * T tokens (DAPO's token level), so losses of micro-batches weighted by their
    fraction of the tokens add up to the loss of the whole batch.

    The old policy has two roles, which are kept apart. Ratios, which the clip keeps near 1, are
    relative to the policy that the updates begin with. Each token of the surrogate is weighted by
    how much more likely that policy makes it than the sampler did. `k3_corrected` is weighted in
    the same way; the other KL terms are unchanged.

    `kl/reference_tokens` are the values of `corrected_kl_estimate`, and `kl/reference` their mean,
    whichever estimator the loss uses, so that runs, and the updates of one rollout, are comparable;
    plain k3 is biased on tokens from an older policy. NaN without a reference.

    Source: DeepSeekMath (arXiv 2402.03300), equation 3; decoupled: Hilton et al. 2022
    (arXiv 2110.00641), for language models AReaL (arXiv 2505.24298).

    Args:
        inputs: `reference_log_probs` may be None only if the loss weighs no KL to the reference.
        options: Kind of the policy loss, and the weights of the other terms.

    Returns:
        The total with its gradient; terms `loss/policy`, `loss/kl` and, with a weight,
        `loss/entropy`; metrics `kl/reference`, `kl/behaviour` and those of the kind.

    Raises:
        ValueError: A KL to the reference has a weight, but there is no reference.
    """
    log_probs, old_log_probs = inputs.log_probs, inputs.old_log_probs
    sampling_log_probs = inputs.sampling_log_probs
    if sampling_log_probs is None:
        sampling_log_probs = old_log_probs
    reference_log_probs, kl_coef = inputs.reference_log_probs, options.kl_coef_in_loss
    if reference_log_probs is None and kl_coef != 0:
        raise ValueError(
            f"kl_coef {kl_coef} without reference_log_probs: pass the reference policy's "
            "log-probs, or set kl_coef to 0"
        )
    if isinstance(options, CustomLoss):
        policy = custom_loss(inputs, options)
    else:
        policy = mean_surrogate(inputs, options)
    kl_behaviour = kl_estimate(sampling_log_probs, log_probs, estimator="k3").mean()
    kl_reference = torch.full_like(policy.total, torch.nan)
    kl = torch.zeros_like(policy.total)
    metrics = dict(policy.metrics)
    # A weight of 0 adds no term at all, because 0 times an overflowed estimate would be NaN.
    if options.kl_behaviour_coef != 0:
        kl = kl + options.kl_behaviour_coef * kl_behaviour
    if reference_log_probs is not None:
        estimates = corrected_kl_estimate(
            log_probs, old_log_probs, reference_log_probs, inputs.importance_weights
        )
        kl_reference, metrics["kl/reference_tokens"] = estimates.mean(), estimates
        if options.kl_estimator != "k3_corrected":
            estimates = kl_estimate(log_probs, reference_log_probs, estimator=options.kl_estimator)
        if kl_coef != 0:
            kl = kl + kl_coef * estimates.mean()
    total, terms = policy.total + kl, {"loss/policy": policy.total, "loss/kl": kl}
    if options.entropy_coef != 0:
        if inputs.entropy is None:
            raise ValueError("entropy_coef without entropy: pass the entropy of the replay")
        terms["loss/entropy"] = -options.entropy_coef * inputs.entropy.mean()
        total = total + terms["loss/entropy"]
    metrics |= {"kl/reference": kl_reference, "kl/behaviour": kl_behaviour}
    return LossOutput(total, _detached(metrics), _detached(terms))


def _detached(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in values.items()}


@dataclass(frozen=True)
class Mismatch:
    """How the trainer's log-probs of tokens differ from the sampler's, and the weights against it.

    Attributes:
        weights: Importance weights, in [0, largest].
        gap: Absolute difference, nats.
        metrics: Values of each token by the name of their mean.
    """

    weights: Float32[Tensor, "N T"]
    gap: Float32[Tensor, "N T"]
    metrics: Mapping[str, Shaped[Tensor, "N T"]]


def measure_mismatch(
    old_log_probs: Float32[Tensor, "N T"],
    sampling_log_probs: Float32[Tensor, "N T"],
    *,
    weights: ImportanceWeights,
    largest: float,
    smallest: float = 0.0,
) -> Mismatch:
    """Weights with which tokens count as if drawn from the policy that the updates begin with.

    Sampler and trainer compute the same distribution in different ways, so that their log-probs
    differ by rounding (on average 1e-6 nats in fp32, up to 1e-1 in bf16), and the sampler's weights
    may be older. With r = exp(old_log_prob - sampling_log_prob), a weight is min(r, largest) for
    `truncate`; for `mask`, r if it is between smallest and largest, inclusive, and 0 otherwise.
    Both bound the variance of r, at the price of a bias: the first still learns from a token about
    which the sampler says little, the second does not.

    Metrics are those of r, before any limit: its mean and effective sample size, the k3 estimate of
    KL(sampler || trainer), and the fractions of tokens outside 0.8 to 1.2 and outside the limits.

    Source: Ionides, "Truncated importance sampling" (2008), J. Comput. Graph. Stat. 17(2); between
    sampler and trainer: Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"; leaving tokens out: IcePop in Ling Team 2025 (arXiv 2510.18855), from
    0.5 to 5.

    Args:
        old_log_probs: Log-probs (natural) under the policy that the updates begin with, finite.
        sampling_log_probs: Log-probs as recorded by the sampler.
        weights: How a ratio becomes a weight; `none`: all weights are 1.
        largest: Largest weight, >= 1.
        smallest: Smallest weight that is not 0, in [0, 1]; only for `mask`.
    """
    ratio = torch.exp(old_log_probs - sampling_log_probs)
    is_limited = ratio > largest
    if weights == "mask":
        is_limited = is_limited | (ratio < smallest)
        kept = ratio.masked_fill(is_limited, 0.0)
    elif weights == "truncate":
        kept = ratio.clamp(max=largest)
    else:
        kept = torch.ones_like(ratio)
    exact = ratio.double()
    metrics = {
        "mismatch/ratio": exact,
        "mismatch/ratio_square": exact.square(),
        "mismatch/kl": kl_estimate(sampling_log_probs, old_log_probs, estimator="k3"),
        "mismatch/outside_fraction": (exact - 1.0).abs() > _FAR,
        "mismatch/limited_fraction": is_limited,
    }
    return Mismatch(kept, (old_log_probs - sampling_log_probs).abs(), metrics)


def reference_penalty(
    sampled_log_probs: Float32[Tensor, "*sequences T"],
    reference_log_probs: Float32[Tensor, "*sequences T"],
    *,
    kl_coef: float,
) -> Float32[Tensor, "*sequences"]:
    """KL penalty to subtract from each image's reward before advantages are computed.

    penalty = kl_coef * sum_T(sampled_log_probs - reference_log_probs), the k1 estimate of the KL of
    whole images. The loss takes the mean of its KL over tokens; here, the sum has the same scale.
    The surrogate is a mean over tokens too: it multiplies the single penalty of an image by the
    gradient of each token's mean log-prob, 1 / T of that of the image.

    With advantages that are only centred (`mean_only`), the expected gradient of an update is
    kl_coef / T times (G - 1) / G that of the KL of whole images: like a reward's, because an image
    contributes to the mean it is compared with. In the loss, `kl_coef` has this gradient without (G
    - 1) / G if tokens are independent; otherwise the loss leaves out a token's effect on the KL of
    later ones, which made a difference of 6 to 10 % with three tokens. If advantages are divided by
    a standard deviation, the penalty is too: in a group whose penalised rewards have a spread of
    0.1 it counts tenfold.

    Source: InstructGPT (arXiv 2203.02155), equation 2.

    Args:
        sampled_log_probs: Log-probs as sampled.
        reference_log_probs: Log-probs of the same tokens under the reference policy.
        kl_coef: Reward lost per nat, >= 0.

    Returns:
        One penalty per sequence, of either sign; advantages are computed from reward - penalty.
    """
    estimate = kl_estimate(sampled_log_probs, reference_log_probs, estimator="k1")
    return kl_coef * estimate.sum(dim=-1)


def effective_sample_size(mean: float, mean_square: float) -> float:
    """Fraction of samples that importance weights w effectively leave: mean(w)^2 / mean(w^2).

    Source: Kish, "Survey Sampling" (1965); for importance sampling Owen, "Monte Carlo theory,
    methods and examples" (2013), section 9.3.

    Args:
        mean: Mean of n importance weights, each >= 0.
        mean_square: Mean of their squares.

    Returns:
        In (0, 1]: 1 if all weights are equal, 1 / n if a single weight is nonzero; NaN if all
        weights are 0 or one is not finite.
    """
    return math.nan if mean_square == 0 else mean * mean / mean_square
