"""The `loss` section of the config: one class a kind, each with its policy loss.

A kind of your own needs no class: `loss.kind=custom` names a function.
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
    reference_sync_every: int | None = Field(default=None, ge=1)
    """Training steps after which the reference follows the policy; absent: it stays the untrained
    policy, and the KL is to that one."""
    reference_mix: float = Field(default=0.6, gt=0.0, le=1.0)
    """The reference becomes reference_mix * policy + (1 - reference_mix) * reference."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the mean entropy of a token, nats, which is then raised; 0: not part of the loss.
    Takes the memory of one more hidden state a token in the update."""

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

    @property
    def weighs_advantages_alone(self) -> bool:
        """Whether a sequence of advantage 0 has no gradient."""
        is_kl_weighted = self.kl_coef_in_loss != 0 or self.kl_behaviour_coef != 0
        return self.weighs_no_more_than_kl and not is_kl_weighted

    @property
    def weighs_no_more_than_kl(self) -> bool:
        """Whether a sequence of advantage 0 has the gradient of KL terms, or none."""
        return self.entropy_coef == 0

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """The part that raises the probability of what was rewarded, without the KL terms."""
        raise NotImplementedError


class TokenLoss(LossSettings):
    """What the kinds share that are made of a surrogate for each token."""

    top_entropy_quantile: float | None = Field(default=None, gt=0.0, le=1.0)
    """Only this part of an image's tokens, those of highest entropy, has a policy loss; the mean
    is still over all tokens. Absent: all of them."""

    def surrogate(
        self, inputs: LossInputs, token_weights: Float32[Tensor, "N T"] | None
    ) -> Surrogate:
        """The loss of each token, weighted."""
        raise NotImplementedError

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """The mean surrogate; see `mean_surrogate`."""
        token_weights = self.token_weights(inputs)
        return mean_surrogate(self.surrogate(inputs, token_weights), inputs, token_weights)

    def token_weights(self, inputs: LossInputs) -> Float32[Tensor, "N T"] | None:
        """What each token counts in the policy loss; None where all count alike."""
        if self.top_entropy_quantile is None or self.top_entropy_quantile == 1.0:
            return None
        return top_entropy_weights(inputs, self.top_entropy_quantile)


class ClippedLoss(TokenLoss):
    """The clipped surrogate of PPO: see `clipped_surrogate` and `sequence_surrogate`."""

    kind: Literal["clipped"] = "clipped"
    """Which loss."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """The probability ratio is clipped above 1 + clip_high."""
    ratio_cap: float | None = Field(default=None, gt=1.0)
    """For images worse than their group, tokens whose ratio rose above this have no gradient
    (two-sided clip); above 1 + clip_high. Absent: their gradient grows with the ratio."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or their geometric mean over the image (GSPO); of the latter 0.02 to
    0.03 is the scale of clip_low and clip_high."""

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
        """Clipped, at the level of tokens or of the sequence."""
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
    """The policy gradient with capped importance weights: see `cispo_surrogate`."""

    kind: Literal["cispo"]
    """Which loss."""
    ratio_cap: float = Field(default=5.0, ge=1.0)
    """Largest importance weight of a token: of the ratio itself, not of its distance to 1."""

    def surrogate(
        self, inputs: LossInputs, token_weights: Float32[Tensor, "N T"] | None
    ) -> Surrogate:
        """Log-probs weighted by capped ratios; only the gradient is meaningful, not the value."""
        surrogate = cispo_surrogate(
            inputs.log_probs,
            inputs.proximal_log_probs,
            inputs.advantages,
            ratio_cap=self.ratio_cap,
        )
        return _weighted(surrogate, token_weights)


class SapoLoss(TokenLoss):
    """A soft gate in the place of the clip: see `sapo_surrogate`."""

    kind: Literal["sapo"]
    """Which loss."""
    tau_positive: float = Field(default=1.0, gt=0.0)
    """Steepness of the gate for images better than their group."""
    tau_negative: float = Field(default=1.05, gt=0.0)
    """Steepness of the gate for the others."""

    def surrogate(
        self, inputs: LossInputs, token_weights: Float32[Tensor, "N T"] | None
    ) -> Surrogate:
        """Gated."""
        surrogate = sapo_surrogate(
            inputs.log_probs,
            inputs.proximal_log_probs,
            inputs.advantages,
            tau_positive=self.tau_positive,
            tau_negative=self.tau_negative,
        )
        return _weighted(surrogate, token_weights)


class GmpoLoss(TokenLoss):
    """The geometric mean of clipped token ratios: see `gmpo_surrogate`."""

    kind: Literal["gmpo"]
    """Which loss."""
    log_clip: float = Field(default=0.4, gt=0.0)
    """Bound of a token's |log ratio|."""

    def surrogate(
        self, inputs: LossInputs, token_weights: Float32[Tensor, "N T"] | None
    ) -> Surrogate:
        """The mean is inside, and so are the weights of tokens."""
        return gmpo_surrogate(
            inputs.log_probs,
            inputs.proximal_log_probs,
            inputs.advantages,
            log_clip=self.log_clip,
            token_weights=token_weights,
        )


class CustomLoss(LossSettings):
    """A function of the user's own: `LossInputs` -> `LossOutput`, without the KL terms."""

    kind: Literal["custom"]
    """Which loss."""
    function: str = Field(min_length=3, max_length=500, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`, importable from the folder the run starts in."""

    @property
    def weighs_no_more_than_kl(self) -> bool:
        """Unknown, so no."""
        return False

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


LOSSES: Mapping[str, type[LossSettings]] = {
    "clipped": ClippedLoss,
    "cispo": CispoLoss,
    "sapo": SapoLoss,
    "gmpo": GmpoLoss,
    "custom": CustomLoss,
}
"""Kinds of loss by the value of `loss.kind`."""

AnyLoss = ClippedLoss | CispoLoss | SapoLoss | GmpoLoss | CustomLoss
"""One of them."""


def _weighted(surrogate: Surrogate, weights: Float32[Tensor, "N T"] | None) -> Surrogate:
    return surrogate if weights is None else replace(surrogate, loss=surrogate.loss * weights)


def _described(found: object) -> str:
    if not isinstance(found, LossOutput):
        return f"a {type(found).__name__}"
    shape = tuple(getattr(found.total, "shape", ()))
    return f"a total of shape {shape}" if shape else "a total without gradient"
