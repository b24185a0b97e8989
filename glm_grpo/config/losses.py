"""The `loss` section of the config: the options of each kind, which `glm_grpo.grpo` computes.

Your own loss needs no class: `loss.kind=custom` names a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from glm_grpo.errors import ConfigError
from rewards.options import FunctionName, MayChange, Options, PathText, problem_at
from rewards.types import RewardError
from rewards.user_functions import load_function

ImportanceWeights = Literal["truncate", "mask", "none"]
"""Weight of a token whose importance ratio is out of bounds: limited, or 0; or all weights 1."""

KlEstimator = Literal["k1", "k2", "k3"]
"""Estimator of a KL divergence from tokens: see `kl_estimate` in `glm_grpo.grpo.losses`."""

LossKlEstimator = Literal["k3_corrected", KlEstimator]
"""Estimator of the KL to the reference in the loss: `corrected_kl_estimate` or one of those."""


class LossSettings(Options):
    """Options that all kinds of loss share: regularisation, and importance weights."""

    kl_coef: float = Field(ge=0.0)
    """Weight of the KL divergence to the reference policy; at 0 the reference never runs."""
    kl_estimator: LossKlEstimator
    """Per-token estimator of that divergence. null: k3_corrected in the loss, k1 in the reward.
    k3_corrected is k3 times the probability ratio, which stays unbiased in later updates of a
    rollout, for each token given those before it."""
    kl_placement: Literal["loss", "reward"]
    """Add the divergence to the loss, or subtract it, summed over an image's tokens, from the
    reward before advantages are computed. The coefficient has the same scale in both cases; if
    advantages are divided by the rewards' standard deviation, the penalty is divided too. Only in
    the reward is a token also penalised for the divergence of the tokens after it."""
    kl_behaviour_coef: float = Field(ge=0.0)
    """Weight of the KL divergence to the policy that sampled; 0: not used."""
    reference_sync_steps: int | None = Field(default=None, ge=1)
    """Training steps between updates of the reference from the policy; absent: the reference stays
    the base policy."""
    reference_mixup_alpha: float = Field(default=0.6, gt=0.0, le=1.0)
    """a in reference = a * policy + (1 - a) * reference, at each update of the reference."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of a bonus for the mean token entropy, in nats; 0: not used. Needs memory for one more
    hidden state per token during the update."""
    importance_weights: ImportanceWeights = "truncate"
    """Weight each token by the ratio of its probability in the trainer to that in the sampler,
    which rounds differently in half precision, and has older weights with `train.mode` async. Above
    `max_importance_ratio`, limit the weight to it (truncate), or set it to 0 (mask); none: all
    weights are 1."""
    max_importance_ratio: float = Field(default=2.0, ge=1.0)
    """Largest weight of a token."""
    min_importance_ratio: float | None = Field(default=None, gt=0.0, le=1.0)
    """With `importance_weights: mask`, tokens with a smaller ratio also get weight 0; absent: they
    keep their small weight."""

    @model_validator(mode="before")
    @classmethod
    def _choose_estimator(cls, values: object) -> object:
        # Set here, so that a stored config states which estimator was used.
        if isinstance(values, Mapping) and values.get("kl_estimator") is None:
            is_in_reward = values.get("kl_placement") == "reward"
            return {**values, "kl_estimator": "k1" if is_in_reward else "k3_corrected"}
        return values

    @model_validator(mode="after")
    def _check_importance(self) -> LossSettings:
        if self.min_importance_ratio is not None and self.importance_weights != "mask":
            rule = (
                "needs loss.importance_weights=mask: a truncated token already has a small weight"
            )
            remedy = "set loss.importance_weights=mask, or leave loss.min_importance_ratio out"
            raise problem_at(("min_importance_ratio",), self.min_importance_ratio, rule, remedy)
        return self

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


class TokenLoss(LossSettings):
    """Shared by the kinds that compute one surrogate per token."""

    top_entropy_quantile: float | None = Field(default=None, gt=0.0, le=1.0)
    """Apply the policy loss only to this fraction of an image's tokens, those with the highest
    entropy; the mean still runs over all tokens. Absent: use all tokens."""


class ClippedLoss(TokenLoss):
    """PPO's clipped surrogate: see `clipped_surrogate` and `sequence_surrogate`."""

    kind: Literal["clipped"] = "clipped"
    """Kind of loss."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Clip the probability ratio below 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """Clip the probability ratio above 1 + clip_high."""
    two_sided_clip: float | None = Field(default=None, gt=1.0)
    """In images worse than their group, drop the gradient of tokens whose ratio is above this
    (two-sided clip); must exceed 1 + clip_high. Absent: their gradient grows with the ratio."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Use the ratio of each token, or the geometric mean over the image (GSPO), for which clip_low
    and clip_high are typically 0.02 to 0.03."""

    @model_validator(mode="after")
    def _check_cap(self) -> ClippedLoss:
        if self.two_sided_clip is not None and self.two_sided_clip <= 1.0 + self.clip_high:
            rule = f"must be above 1 + clip_high = {1.0 + self.clip_high:g}, where the clip acts"
            remedy = "set loss.two_sided_clip=4, or leave it out"
            raise problem_at(("two_sided_clip",), self.two_sided_clip, rule, remedy)
        return self


class CispoLoss(TokenLoss):
    """Policy gradient with capped importance weights: see `cispo_surrogate`."""

    kind: Literal["cispo"]
    """Kind of loss."""
    max_ratio: float = Field(default=5.0, ge=1.0)
    """Largest importance weight of a token; caps the ratio itself, not its distance to 1."""


class SapoLoss(TokenLoss):
    """Soft gate instead of the clip: see `sapo_surrogate`."""

    kind: Literal["sapo"]
    """Kind of loss."""
    tau_positive: float = Field(default=1.0, gt=0.0)
    """Gate steepness for images better than their group."""
    tau_negative: float = Field(default=1.05, gt=0.0)
    """Gate steepness for all other images."""


class GmpoLoss(TokenLoss):
    """Geometric mean of clipped token ratios: see `gmpo_surrogate`."""

    kind: Literal["gmpo"]
    """Kind of loss."""
    log_clip: float = Field(default=0.4, gt=0.0)
    """Bound on a token's |log ratio|."""


class CustomLoss(LossSettings):
    """A user-defined function: `LossInputs` -> `LossOutput`, without the KL terms."""

    kind: Literal["custom"]
    """Kind of loss."""
    function: FunctionName
    """`file.py:function`, in `folder`, or `module:function`, in `folder` or installed."""
    folder: MayChange[PathText | None] = None
    """Folder of the file or module. null: the folder of the config if it is there, otherwise the
    working folder; a run stores what it found."""

    @property
    def weighs_no_more_than_kl(self) -> bool:
        """False, because the function is unknown."""
        return False

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        try:
            return load_function(self.function, self.folder)
        except RewardError as error:
            raise ConfigError(f"loss.function = {self.function}: {error}") from error


SurrogateLoss = ClippedLoss | CispoLoss | SapoLoss | GmpoLoss
"""Options of the kinds that compute one surrogate per token."""

AnyLoss = SurrogateLoss | CustomLoss
"""Options of any kind of loss."""

LOSSES: Mapping[str, type[AnyLoss]] = {
    get_args(each.model_fields["kind"].annotation)[0]: each for each in get_args(AnyLoss)
}
"""Classes of options by the value of `loss.kind`."""
