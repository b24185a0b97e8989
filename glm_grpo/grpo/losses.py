"""The loss of GRPO, a part at a time.

N sequences of T tokens, all of them valid: images of one size have one length, so there is no
padding mask, and a mean over tokens is the mean of the sequences' means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from jaxtyping import Bool, Float32, Shaped
from pydantic import Field, model_validator
from torch import Tensor

from glm_grpo.errors import ConfigError
from glm_grpo.types import OffPolicyCorrection
from rewards.options import Options
from rewards.terms.custom import load_function
from rewards.types import RewardError

KlEstimator = Literal["k1", "k2", "k3"]

LossKlEstimator = Literal["k3_corrected", "k1", "k2", "k3"]
"""Of the KL to the reference in the loss: see `corrected_kl_estimate` and `kl_estimate`."""

StaleTreatment = Literal["truncate", "mask"]
"""What becomes of a token whose importance ratio is out of bounds: a limited weight, or none."""


@dataclass(frozen=True)
class ClippedSurrogate:
    """The policy part of the loss, token by token.

    Attributes:
        loss: To be minimised; carries the gradient.
        ratio: Probability under the policy over probability under the sampling policy, > 0;
            without gradient.
        is_clipped: True where the clipped branch is the active one, so that the token has no
            gradient.
    """

    loss: Float32[Tensor, "N T"]
    ratio: Float32[Tensor, "N T"]
    is_clipped: Bool[Tensor, "N T"]


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees of N sequences.

    Attributes:
        log_probs: Of the policy being trained, with gradient.
        old_log_probs: As sampled.
        reference_log_probs: Of the reference policy; None where nothing weighs them.
        advantages: One a sequence.
        correction: Of these tokens; None where the policy that sampled is the one that the updates
            begin with.
    """

    log_probs: Float32[Tensor, "N T"]
    old_log_probs: Float32[Tensor, "N T"]
    reference_log_probs: Float32[Tensor, "N T"] | None
    advantages: Float32[Tensor, " N"]
    correction: OffPolicyCorrection | None = None

    @property
    def proximal_log_probs(self) -> Float32[Tensor, "N T"]:
        """Of the policy that the updates begin with: what ratios are taken to."""
        return self.old_log_probs if self.correction is None else self.correction.proximal_log_probs


@dataclass(frozen=True)
class LossOutput:
    """A loss and what is reported of it.

    Attributes:
        total: To be minimised, a scalar: a mean over tokens, so that micro-batches weighed by their
            share of tokens add up to the batch; carries the gradient.
        metrics: By the name they are stored under; a scalar, or one value a token. What is
            reported is the mean over the tokens of all sequences. One named `ratio/mean_square`
            makes `ratio/effective_sample_size` of `ratio/mean`.
    """

    total: Tensor
    metrics: Mapping[str, Shaped[Tensor, "..."]]


class LossSettings(Options):
    """What all kinds of loss share: the KL terms that hold the policy where it was."""

    kl_coef: float = Field(ge=0.0)
    """Weight of the KL divergence to the reference policy; 0: the reference is never run."""
    kl_estimator: LossKlEstimator
    """Estimator of that divergence per token; null: k3_corrected in the loss (k3 times the
    probability ratio: unbiased in later updates of a rollout too), k1 in the reward."""
    kl_placement: Literal["loss", "reward"]
    """Add the divergence to the loss, or subtract it, summed over an image's tokens, from its
    reward before advantages are made. The coefficient means the same in both; a reward's standard
    deviation, where advantages are divided by it, divides it too."""
    kl_behaviour_coef: float = Field(ge=0.0)
    """Weight of the KL divergence to the policy that sampled; 0: not part of the loss."""

    @model_validator(mode="before")
    @classmethod
    def _choose_estimator(cls, values: object) -> object:
        # Chosen here, so that what a run stores says what it computes.
        if isinstance(values, Mapping) and values.get("kl_estimator") is None:
            is_in_reward = values.get("kl_placement") == "reward"
            return {**values, "kl_estimator": "k1" if is_in_reward else "k3_corrected"}
        return values

    @property
    def kl_coef_in_loss(self) -> float:
        """Weight of the KL to the reference in the loss; 0 where the reward has it."""
        return 0.0 if self.kl_placement == "reward" else self.kl_coef

    @property
    def kl_coef_in_reward(self) -> float:
        """Weight of the KL to the reference in the reward; 0 where the loss has it."""
        return self.kl_coef if self.kl_placement == "reward" else 0.0

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """The part that raises the probability of what was rewarded, without the KL terms."""
        raise NotImplementedError


class ClippedLoss(LossSettings):
    """The clipped surrogate of PPO: see `clipped_surrogate`."""

    kind: Literal["clipped"] = "clipped"
    """Which loss."""
    clip_low: float = Field(gt=0.0, lt=1.0)
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(gt=0.0)
    """The probability ratio is clipped above 1 + clip_high."""

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """The mean surrogate, with the ratio to the policy that the updates begin with."""
        surrogate = clipped_surrogate(
            inputs.log_probs,
            inputs.proximal_log_probs,
            inputs.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        loss = surrogate.loss
        if inputs.correction is not None:
            loss = loss * inputs.correction.weights
        metrics = {
            "ratio/mean": surrogate.ratio,
            "ratio/clip_fraction": surrogate.is_clipped,
            "ratio/mean_square": surrogate.ratio.double().square(),
        }
        return LossOutput(loss.mean(), metrics)


class CustomLoss(LossSettings):
    """A function of the user's own: `LossInputs` -> `LossOutput`, without the KL terms."""

    kind: Literal["custom"]
    """Which loss."""
    function: str = Field(min_length=3, max_length=500, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`, importable from the folder the run starts in."""

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """What the function returns.

        Raises:
            ConfigError: The function cannot be imported, or returns no loss.
        """
        found = self.load()(inputs)
        is_loss = isinstance(found, LossOutput) and isinstance(found.total, Tensor)
        if not is_loss or found.total.ndim != 0 or not found.total.requires_grad:
            raise ConfigError(
                f"loss.function = {self.function}: returned {_described(found)}; it must return "
                "glm_grpo.grpo.losses.LossOutput(total, metrics) whose total is one number with "
                "the gradient of inputs.log_probs"
            )
        for name, value in found.metrics.items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"loss.function = {self.function}: metric {name!r} is a "
                    f"{type(value).__name__}; it must be a tensor, a scalar or one value a token"
                )
        return found

    def load(self) -> Callable[[LossInputs], LossOutput]:
        """The function.

        Raises:
            ConfigError: It cannot be imported.
        """
        try:
            return cast("Callable[[LossInputs], LossOutput]", load_function(self.function))
        except RewardError as error:
            raise ConfigError(f"loss.function = {self.function}: {error}") from error


LOSSES: Mapping[str, type[LossSettings]] = {"clipped": ClippedLoss, "custom": CustomLoss}
"""Kinds of loss by the value of `loss.kind`."""


def _described(found: object) -> str:
    if not isinstance(found, LossOutput):
        return f"a {type(found).__name__}"
    shape = tuple(getattr(found.total, "shape", ()))
    return f"a total of shape {shape}" if shape else "a total without gradient"


def kl_estimate(
    log_probs: Float32[Tensor, "*tokens"],
    reference_log_probs: Float32[Tensor, "*tokens"],
    *,
    estimator: KlEstimator,
) -> Float32[Tensor, "*tokens"]:
    """Estimate KL(policy || reference) from tokens drawn from the policy.

    With d = reference_log_probs - log_probs:

    - k1 = -d: unbiased, of either sign. As a *loss* it does nothing on average: the expectation
      of its gradient is 0 on-policy. It belongs in the reward (`reference_penalty`).
    - k2 = d^2 / 2: biased, >= 0; the expectation of its gradient is that of the KL.
    - k3 = exp(d) - d - 1: unbiased, >= 0, the one in the GRPO paper; the expectation of its
      gradient is that of KL(reference || policy), the same to second order.

    Source: Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html; k3 in
    the loss: DeepSeekMath (arXiv 2402.03300), equation 4; the gradients: Tang and Munos
    (arXiv 2506.09477).

    Args:
        log_probs: Of the distribution the tokens come from, natural logarithm, finite.
        reference_log_probs: Of the other distribution, for the same tokens.
        estimator: One of the three above.

    Returns:
        One estimate a token, in nats.
    """
    difference = reference_log_probs - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    # expm1 keeps the digits that exp(d) - 1 loses near d = 0, where a healthy run lives; the
    # clamp removes the rounding that is left, which could be below 0 by one unit.
    return (torch.expm1(difference) - difference).clamp(min=0.0)


def corrected_kl_estimate(
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    reference_log_probs: Float32[Tensor, "N T"],
    correction: OffPolicyCorrection | None = None,
) -> Float32[Tensor, "N T"]:
    """Estimate KL(policy || reference) from tokens that an older policy sampled: r * k3.

    r = exp(log_prob - old_log_prob) is the ratio to the policy that sampled, with its gradient.
    Estimate and gradient are unbiased for every sampling policy that can draw all tokens, so also
    in the second and later updates of a rollout: the expectation of r * k3 under the sampling
    policy is that of k3 under the policy. The gradient of one token is r * (log_prob -
    reference_log_prob), k2's times r, while k3's own is 1 - exp(reference_log_prob - log_prob),
    which a single token that became unlikely blows up.

    Where the policy has moved on since it sampled, r = weight * exp(log_prob - proximal_log_prob)
    with the correction's weight, which is the ratio to the policy that sampled too, as long as the
    weight is not limited. A ratio to the proximal policy alone would take the tokens for its own.
    The limit bounds the variance as it does in the surrogate: with it, both parts of the loss see
    the same tokens weighed alike, and one that is dropped is dropped from both.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1; TRL's `use_bias_correction_kl`.

    Args:
        log_probs: Of the policy being trained, with gradient.
        old_log_probs: As sampled.
        reference_log_probs: Of the reference policy.
        correction: As in `LossInputs`.

    Returns:
        One estimate a token, in nats, >= 0.
    """
    if correction is None:
        ratio = torch.exp(log_probs - old_log_probs.detach())
    else:
        ratio = torch.exp(log_probs - correction.proximal_log_probs) * correction.weights
    return ratio * kl_estimate(log_probs, reference_log_probs, estimator="k3")


def clipped_surrogate(
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    advantages: Float32[Tensor, " N"],
    *,
    clip_low: float,
    clip_high: float,
) -> ClippedSurrogate:
    """The clipped objective of PPO, as a loss.

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_prob - old_log_prob).
    The bound acts on the side where the ratio already went the way of the advantage: above for
    A > 0, below for A < 0. On the other side the token keeps its gradient and is brought back.

    Source: PPO (arXiv 1707.06347), equation 7; separate bounds: DAPO (arXiv 2503.14476),
    section 3.1; one advantage for all tokens of an image: DeepSeekMath (arXiv 2402.03300).

    Args:
        log_probs: Of the policy being trained, with gradient.
        old_log_probs: As sampled.
        advantages: One a sequence.
        clip_low: See `ClippedLoss`.
        clip_high: See `ClippedLoss`.

    Returns:
        Loss, ratio and clipping of every token.
    """
    ratio = torch.exp(log_probs - old_log_probs.detach())
    weight = advantages[:, None]
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * weight, clipped * weight)
    is_above = (ratio > 1.0 + clip_high) & (weight > 0)
    is_below = (ratio < 1.0 - clip_low) & (weight < 0)
    return ClippedSurrogate(loss=loss, ratio=ratio.detach(), is_clipped=is_above | is_below)


def grpo_loss(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """The policy loss, plus KL to the reference and to the sampling policy.

    total = policy loss + kl_coef * mean(KL(policy || reference))
            + kl_behaviour_coef * mean(KL(sampling policy || policy))

    Tokens were drawn from the sampling policy, so the second KL is unbiased at every update. The
    first is with `k3_corrected`; with the others only while policy and sampling policy agree, as
    in the paper. Every mean runs over all N * T tokens (DAPO's token level), so losses of
    micro-batches weighed by their share of tokens add up to the loss of the whole batch.

    Where the policy has moved on since it sampled, `correction` decouples the two roles of the old
    policy: ratios, which the clip keeps near 1, are to the policy that the updates begin with, and
    each token of the surrogate is weighed by how much likelier that policy makes it than the one
    that sampled. `k3_corrected` is weighed likewise; the other KL terms stay as they are.

    `kl/reference` is the mean of `corrected_kl_estimate`, whichever estimator the loss uses, so
    that runs compare, and so do the updates of a rollout: of an older policy's tokens k3 alone is
    no estimate. NaN without a reference: it was not measured.

    Source: DeepSeekMath (arXiv 2402.03300), equation 3; decoupled: Hilton et al. 2022
    (arXiv 2110.00641), for language models AReaL (arXiv 2505.24298).

    Args:
        inputs: `reference_log_probs` is None only where the loss weighs no KL to the reference.
        settings: Of one kind.

    Returns:
        The total with its gradient; `loss/total`, `loss/policy`, `loss/kl`, `kl/reference`,
        `kl/behaviour` and the metrics of the kind.

    Raises:
        ValueError: A KL to the reference is weighed and there is no reference.
    """
    log_probs, old_log_probs = inputs.log_probs, inputs.old_log_probs
    reference_log_probs, kl_coef = inputs.reference_log_probs, settings.kl_coef_in_loss
    if reference_log_probs is None and kl_coef != 0:
        raise ValueError(
            f"kl_coef {kl_coef} without reference_log_probs: pass the reference policy's "
            "log-probs, or set kl_coef to 0"
        )
    policy = settings.policy_loss(inputs)
    kl_behaviour = kl_estimate(old_log_probs, log_probs, estimator="k3").mean()
    kl_reference = torch.full_like(policy.total, torch.nan)
    kl = torch.zeros_like(policy.total)
    # A weight of 0 adds no term at all: 0 times an overflowed estimate would be NaN.
    if settings.kl_behaviour_coef != 0:
        kl = kl + settings.kl_behaviour_coef * kl_behaviour
    if reference_log_probs is not None:
        estimates = corrected_kl_estimate(
            log_probs, old_log_probs, reference_log_probs, inputs.correction
        )
        kl_reference = estimates.mean()
        if settings.kl_estimator != "k3_corrected":
            estimates = kl_estimate(log_probs, reference_log_probs, estimator=settings.kl_estimator)
        if kl_coef != 0:
            kl = kl + kl_coef * estimates.mean()
    total = policy.total + kl
    # Last: whether an update is skipped is read off the total, whatever a custom loss calls so.
    metrics = {
        **policy.metrics,
        "loss/total": total,
        "loss/policy": policy.total,
        "loss/kl": kl,
        "kl/reference": kl_reference,
        "kl/behaviour": kl_behaviour,
    }
    return LossOutput(total, {name: value.detach() for name, value in metrics.items()})


def importance_weights(
    proximal_log_probs: Float32[Tensor, "*sequences T"],
    old_log_probs: Float32[Tensor, "*sequences T"],
    *,
    largest: float,
    treatment: StaleTreatment,
    smallest: float = 0.0,
) -> Float32[Tensor, "*sequences T"]:
    """Weights that make tokens of an older policy count as the present one would draw them.

    With r = exp(proximal_log_prob - old_log_prob): min(r, largest) where treatment is `truncate`; r
    from the smallest to the largest, bounds included, and 0 outside where it is `mask`. Both bound
    the variance that r alone would have, at the price of a bias: the first still learns from a
    token of which the older policy says little, the second does not.

    Source: Ionides, "Truncated importance sampling" (2008), J. Comput. Graph. Stat. 17(2); leaving
    tokens out: IcePop in Ling Team 2025 (arXiv 2510.18855), there from 0.5 to 5.

    Args:
        proximal_log_probs: Of the policy that the updates begin with, natural logarithm, finite.
        old_log_probs: As sampled.
        largest: Of the weights, >= 1.
        treatment: Of tokens above it.
        smallest: Of the weights that are not 0, in [0, 1]; `truncate` does not read it.

    Returns:
        One weight a token, in [0, largest].
    """
    ratio = torch.exp(proximal_log_probs - old_log_probs)
    if treatment == "mask":
        return ratio.masked_fill((ratio > largest) | (ratio < smallest), 0.0)
    return ratio.clamp(max=largest)


def reference_penalty(
    sampled_log_probs: Float32[Tensor, "*sequences T"],
    reference_log_probs: Float32[Tensor, "*sequences T"],
    *,
    kl_coef: float,
) -> Float32[Tensor, "*sequences"]:
    """What the KL in the reward takes from each image's reward, before advantages are formed.

    penalty = kl_coef * sum_T(sampled_log_probs - reference_log_probs), the k1 estimate of the KL of
    whole images. The sum, although the loss takes the mean of its KL over tokens, is what puts both
    on one scale: the surrogate is a mean over tokens too, and multiplies the one penalty of an
    image with the gradient of each token's mean log-prob, 1 / T of that of the image.

    With advantages that are only centred (`mean_only`), the expected gradient of an update is
    (G - 1) / G times that of the same `kl_coef` in the loss, as the rewards' own is, because an
    image is in the mean it is compared with. Where advantages are divided by a standard deviation
    the penalty is, too: of a group whose rewards less penalties spread by 0.1 it counts tenfold.

    Source: InstructGPT (arXiv 2203.02155), equation 2.

    Args:
        sampled_log_probs: As sampled.
        reference_log_probs: Of the reference policy, for the same tokens.
        kl_coef: Reward lost for one nat, >= 0.

    Returns:
        One penalty a sequence, of either sign: reward - penalty is what advantages are made of.
    """
    estimate = kl_estimate(sampled_log_probs, reference_log_probs, estimator="k1")
    return kl_coef * estimate.sum(dim=-1)


def effective_sample_size(mean: float, mean_square: float) -> float:
    """The share of samples that importance weights w leave: mean(w)^2 / mean(w^2).

    Source: Kish, "Survey Sampling" (1965); for importance sampling Owen, "Monte Carlo theory,
    methods and examples" (2013), section 9.3.

    Args:
        mean: Of n importance weights, each >= 0.
        mean_square: Of the weights.

    Returns:
        In (0, 1]: 1 where all weights are equal, 1 / n where one weight is all; NaN where all
        weights are 0 or one is not finite.
    """
    return math.nan if mean_square == 0 else mean * mean / mean_square
