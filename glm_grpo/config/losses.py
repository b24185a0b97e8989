"""The `loss` section of the config: one class per kind, each with its policy loss.

Your own loss needs no class: `loss.kind=custom` names a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, cast

from jaxtyping import Float32
from pydantic import Field, model_validator
from torch import Tensor

from glm_grpo.errors import ConfigError
from glm_grpo.grpo.losses import (
    LossInputs,
    LossKlEstimator,
    LossOutput,
    mean_surrogate,
    top_entropy_weights,
)
from glm_grpo.grpo.surrogates import (
    Surrogate,
    cispo_surrogate,
    clipped_surrogate,
    gmpo_surrogate,
    sapo_surrogate,
    sequence_surrogate,
)
from rewards.options import Options, problem_at
from rewards.terms.custom import load_function
from rewards.types import RewardError


class LossSettings(Options):
    """Options that all kinds of loss share: KL and entropy regularisation."""

    kl_coef: float = Field(ge=0.0)
    """Weight of the KL divergence to the reference policy; at 0 the reference never runs."""
    kl_estimator: LossKlEstimator
    """Per-token estimator of that divergence. null: k3_corrected in the loss (k3 times the
    probability ratio, which stays unbiased in later updates of a rollout), k1 in the reward."""
    kl_placement: Literal["loss", "reward"]
    """Add the divergence to the loss, or subtract it, summed over an image's tokens, from the
    reward before advantages are computed. The coefficient means the same in both cases; if
    advantages are divided by the rewards' standard deviation, the penalty is divided too."""
    kl_behaviour_coef: float = Field(ge=0.0)
    """Weight of the KL divergence to the policy that sampled; 0: not used."""
    reference_sync_every: int | None = Field(default=None, ge=1)
    """Training steps between updates of the reference from the policy; absent: the reference stays
    the untrained policy."""
    reference_mix: float = Field(default=0.6, gt=0.0, le=1.0)
    """At each update, reference = reference_mix * policy + (1 - reference_mix) * reference."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the mean token entropy, in nats, which the loss then increases; 0: not used. Needs
    memory for one more hidden state per token during the update."""

    @model_validator(mode="before")
    @classmethod
    def _choose_estimator(cls, values: object) -> object:
        # Set here, so that a stored config states which estimator was used.
        if isinstance(values, Mapping) and values.get("kl_estimator") is None:
            is_in_reward = values.get("kl_placement") == "reward"
            return {**values, "kl_estimator": "k1" if is_in_reward else "k3_corrected"}
        return values

    @property
    def kl_coef_in_loss(self) -> float:
        """Weight of the KL to the reference in the loss; 0 if the reward contains it."""
        return 0.0 if self.kl_placement == "reward" else self.kl_coef

    @property
    def kl_coef_in_reward(self) -> float:
        """Weight of the KL to the reference in the reward; 0 if the loss contains it."""
        return self.kl_coef if self.kl_placement == "reward" else 0.0

    @property
    def weighs_advantages_alone(self) -> bool:
        """Whether a sequence with advantage 0 has no gradient."""
        is_kl_weighted = self.kl_coef_in_loss != 0 or self.kl_behaviour_coef != 0
        return self.weighs_no_more_than_kl and not is_kl_weighted

    @property
    def weighs_no_more_than_kl(self) -> bool:
        """Whether a sequence with advantage 0 has only the gradient of KL terms, or none."""
        return self.entropy_coef == 0

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """The part of the loss that makes rewarded tokens more likely, without the KL terms."""
        raise NotImplementedError


class TokenLoss(LossSettings):
    """Shared by the kinds that compute one surrogate per token."""

    top_entropy_quantile: float | None = Field(default=None, gt=0.0, le=1.0)
    """Apply the policy loss only to this fraction of an image's tokens, those with the highest
    entropy; the mean still runs over all tokens. Absent: use all tokens."""

    def surrogate(
        self, inputs: LossInputs, token_weights: Float32[Tensor, "N T"] | None
    ) -> Surrogate:
        """Weighted loss of each token."""
        raise NotImplementedError

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """Mean surrogate; see `mean_surrogate`."""
        token_weights = self.token_weights(inputs)
        return mean_surrogate(self.surrogate(inputs, token_weights), inputs, token_weights)

    def token_weights(self, inputs: LossInputs) -> Float32[Tensor, "N T"] | None:
        """Weight of each token in the policy loss; None if all weigh the same."""
        if self.top_entropy_quantile is None or self.top_entropy_quantile == 1.0:
            return None
        return top_entropy_weights(inputs, self.top_entropy_quantile)


class ClippedLoss(TokenLoss):
    """PPO's clipped surrogate: see `clipped_surrogate` and `sequence_surrogate`."""

    kind: Literal["clipped"] = "clipped"
    """Kind of loss."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Clip the probability ratio below 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """Clip the probability ratio above 1 + clip_high."""
    ratio_cap: float | None = Field(default=None, gt=1.0)
    """In images worse than their group, tokens whose ratio rose above this get no gradient
    (two-sided clip); must exceed 1 + clip_high. Absent: their gradient grows with the ratio."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Use the ratio of each token, or the geometric mean over the image (GSPO), for which clip_low
    and clip_high are typically 0.02 to 0.03."""

    @model_validator(mode="after")
    def _check_cap(self) -> ClippedLoss:
        if self.ratio_cap is not None and self.ratio_cap <= 1.0 + self.clip_high:
            rule = f"must be above 1 + clip_high = {1.0 + self.clip_high:g}, where the clip acts"
            remedy = "set loss.ratio_cap=4, or leave it out"
            raise problem_at(("ratio_cap",), self.ratio_cap, rule, remedy)
        return self

    def surrogate(
        self, inputs: LossInputs, token_weights: Float32[Tensor, "N T"] | None
    ) -> Surrogate:
        """Clipped surrogate of each token, or of the whole sequence."""
        args = (inputs.log_probs, inputs.proximal_log_probs, inputs.advantages)
        if self.ratio_level == "sequence":
            return sequence_surrogate(
                *args,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                ratio_cap=self.ratio_cap,
                token_weights=token_weights,
            )
        surrogate = clipped_surrogate(
            *args, clip_low=self.clip_low, clip_high=self.clip_high, ratio_cap=self.ratio_cap
        )
        return _weighted(surrogate, token_weights)


class CispoLoss(TokenLoss):
    """Policy gradient with capped importance weights: see `cispo_surrogate`."""

    kind: Literal["cispo"]
    """Kind of loss."""
    ratio_cap: float = Field(default=5.0, ge=1.0)
    """Largest importance weight of a token; caps the ratio itself, not its distance to 1."""

    def surrogate(
        self, inputs: LossInputs, token_weights: Float32[Tensor, "N T"] | None
    ) -> Surrogate:
        """Log-probs weighted by capped ratios; only the gradient has a meaning, not the value."""
        surrogate = cispo_surrogate(
            inputs.log_probs,
            inputs.proximal_log_probs,
            inputs.advantages,
            ratio_cap=self.ratio_cap,
        )
        return _weighted(surrogate, token_weights)


class SapoLoss(TokenLoss):
    """Soft gate instead of the clip: see `sapo_surrogate`."""

    kind: Literal["sapo"]
    """Kind of loss."""
    tau_positive: float = Field(default=1.0, gt=0.0)
    """Gate steepness for images better than their group."""
    tau_negative: float = Field(default=1.05, gt=0.0)
    """Gate steepness for all other images."""

    def surrogate(
        self, inputs: LossInputs, token_weights: Float32[Tensor, "N T"] | None
    ) -> Surrogate:
        """Gated surrogate of each token."""
        surrogate = sapo_surrogate(
            inputs.log_probs,
            inputs.proximal_log_probs,
            inputs.advantages,
            tau_positive=self.tau_positive,
            tau_negative=self.tau_negative,
        )
        return _weighted(surrogate, token_weights)


class GmpoLoss(TokenLoss):
    """Geometric mean of clipped token ratios: see `gmpo_surrogate`."""

    kind: Literal["gmpo"]
    """Kind of loss."""
    log_clip: float = Field(default=0.4, gt=0.0)
    """Bound on a token's |log ratio|."""

    def surrogate(
        self, inputs: LossInputs, token_weights: Float32[Tensor, "N T"] | None
    ) -> Surrogate:
        """Surrogate with the mean over tokens, and the token weights, already applied."""
        return gmpo_surrogate(
            inputs.log_probs,
            inputs.proximal_log_probs,
            inputs.advantages,
            log_clip=self.log_clip,
            token_weights=token_weights,
        )


class CustomLoss(LossSettings):
    """A user-defined function: `LossInputs` -> `LossOutput`, without the KL terms."""

    kind: Literal["custom"]
    """Kind of loss."""
    function: str = Field(min_length=3, max_length=500, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`, importable from the folder in which the run starts."""

    @property
    def weighs_no_more_than_kl(self) -> bool:
        """False, because the function is unknown."""
        return False

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """Result of the function.

        Raises:
            ConfigError: The function cannot be imported, or does not return a loss.
        """
        found = self.load()(inputs)
        is_loss = isinstance(found, LossOutput) and isinstance(found.total, Tensor)
        if not is_loss or found.total.ndim != 0 or not found.total.requires_grad:
            raise ConfigError(
                f"loss.function = {self.function}: returned {_described(found)}; it must return "
                "glm_grpo.grpo.losses.LossOutput(total, metrics) whose total is one number with a "
                "gradient to inputs.log_probs"
            )
        for name, value in found.metrics.items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"loss.function = {self.function}: metric {name!r} is a "
                    f"{type(value).__name__}; it must be a tensor, a scalar or one value per token"
                )
        return found

    def load(self) -> Callable[[LossInputs], LossOutput]:
        """Import the function.

        Raises:
            ConfigError: It cannot be imported.
        """
        try:
            return cast("Callable[[LossInputs], LossOutput]", load_function(self.function))
        except RewardError as error:
            raise ConfigError(f"loss.function = {self.function}: {error}") from error


LOSSES: Mapping[str, type[LossSettings]] = {
    "clipped": ClippedLoss,
    "cispo": CispoLoss,
    "sapo": SapoLoss,
    "gmpo": GmpoLoss,
    "custom": CustomLoss,
}
"""Loss classes by the value of `loss.kind`."""

AnyLoss = ClippedLoss | CispoLoss | SapoLoss | GmpoLoss | CustomLoss
"""Any of the loss classes."""


def _weighted(surrogate: Surrogate, weights: Float32[Tensor, "N T"] | None) -> Surrogate:
    return surrogate if weights is None else replace(surrogate, loss=surrogate.loss * weights)


def _described(found: object) -> str:
    if not isinstance(found, LossOutput):
        return f"a {type(found).__name__}"
    shape = tuple(getattr(found.total, "shape", ()))
    return f"a total of shape {shape}" if shape else "a total without gradient"
