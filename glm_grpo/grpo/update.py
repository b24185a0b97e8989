"""The optimizer updates of one rollout, for any policy that can replay its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from glm_grpo.grpo.losses import (
    GrpoLoss,
    KlEstimator,
    LossSettings,
    effective_sample_size,
    grpo_loss,
)
from glm_grpo.types import Experience, LossReport


@dataclass(frozen=True)
class Replay:
    """The policy's present view of tokens that were sampled before.

    Attributes:
        log_probs: Natural logarithm, of the distribution the tokens were drawn from; with gradient.
        entropy: Of that distribution at each token, nats.
    """

    log_probs: Float32[Tensor, "N T"]
    entropy: Float32[Tensor, "N T"]


@runtime_checkable
class PolicyForUpdate(Protocol):
    """What an update needs of a policy. Rows index the flattened P * G axis."""

    def replay(self, experience: Experience, rows: Int64[Tensor, " N"]) -> Replay:
        """Score the tokens of these rows, with gradient."""
        ...

    def reference_log_probs(
        self, experience: Experience, rows: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N T"]:
        """Score the tokens of these rows under the reference policy, without gradient."""
        ...

    def trainable_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters the optimizer moves, whose gradient is clipped."""
        ...


@runtime_checkable
class LearningRateSchedule(Protocol):
    """Sets the optimizer's learning rate."""

    def step(self) -> None:
        """Advance by one update."""
        ...


@dataclass(frozen=True)
class UpdateSettings:
    """How one rollout is learnt from.

    Attributes:
        clip_low: The ratio acts down to 1 - clip_low, in [0, 1].
        clip_high: The ratio acts up to 1 + clip_high, >= 0.
        kl_coef: Weight of the KL to the reference policy, >= 0.
        kl_behaviour_coef: Weight of the KL to the policy that sampled, >= 0.
        kl_estimator: Estimator of the KL to the reference in the loss.
        is_kl_in_reward: The KL to the reference was taken from the rewards before advantages were
            formed (`reference_penalty`), so that the loss has none of it.
        max_grad_norm: L2 norm the gradient is clipped to, > 0; None for no clipping.
        micro_batch_size: Sequences replayed at once, >= 1; changes memory, not the gradient.
        updates_per_rollout: Optimizer updates on the same tokens, >= 1.
    """

    clip_low: float
    clip_high: float
    kl_coef: float
    kl_behaviour_coef: float
    kl_estimator: KlEstimator
    is_kl_in_reward: bool
    max_grad_norm: float | None
    micro_batch_size: int
    updates_per_rollout: int

    @property
    def loss(self) -> LossSettings:
        """What is left for the loss."""
        return LossSettings(
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            kl_coef=0.0 if self.is_kl_in_reward else self.kl_coef,
            kl_estimator=self.kl_estimator,
            kl_behaviour_coef=self.kl_behaviour_coef,
        )


@dataclass(frozen=True)
class _MicroBatch:
    """Some rows of the experience; `share` is their part of all tokens."""

    rows: Int64[Tensor, " N"]
    old_log_probs: Float32[Tensor, "N T"]
    advantages: Float32[Tensor, " N"]
    reference_log_probs: Float32[Tensor, "N T"] | None
    share: float


@dataclass(frozen=True)
class _Scored:
    """What one micro-batch leaves for the report, without gradient."""

    share: float
    loss: GrpoLoss
    replay: Replay
    gap: Float32[Tensor, "N T"]


def run_backward(loss: Tensor) -> None:
    """Accumulate gradients as plain torch does."""
    torch.autograd.backward(loss)


def update_policy(
    policy: PolicyForUpdate,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    experience: Experience,
    settings: UpdateSettings,
    backward: Callable[[Tensor], None] = run_backward,
) -> list[LossReport]:
    """Learn from one rollout: `updates_per_rollout` updates, each on the whole batch.

    Every update replays all sequences in micro-batches whose accumulated gradient is that of the
    whole batch. Ratios are always to the log-probs as sampled. Reference log-probs are computed
    once, before the first update, and not at all when the loss has no KL to the reference.

    The optimizer does not step, and no weight changes, when

    - the loss or the gradient norm is not finite: the report says `is_skipped` and keeps the
      values as they are;
    - the gradient is exactly zero, as it is when all advantages are 0 and no KL term is weighed:
      momentum and weight decay would move weights on no evidence. This is no failure, so
      `is_skipped` is False. It is decided on the gradient because processes that train together
      share that: one flat batch among several must not part them.

    The schedule advances in any case: the learning rate is a function of how many updates were
    asked for, and runs that differ in a skipped update stay comparable.

    Args:
        policy: Replays tokens; see `PolicyForUpdate`.
        optimizer: Over the policy's trainable parameters.
        schedule: Of the learning rate, advanced once an update.
        experience: One batch with its rollout and advantages.
        settings: Plain values.
        backward: Accumulates the gradient of a scalar; an accelerator's own may stand here.

    Returns:
        One report an update; `kl_reference` is NaN where no reference was run. `replay_gap` is
        that of the first update, before any step: it measures replay against sampling, not
        learning.
    """
    micro_batches = _micro_batches(policy, experience, settings)
    reports: list[LossReport] = []
    for _ in range(settings.updates_per_rollout):
        optimizer.zero_grad(set_to_none=True)
        parts = [
            _score(policy, experience, micro_batch, settings.loss, backward)
            for micro_batch in micro_batches
        ]
        grad_norm = _clip_gradient(policy.trainable_parameters(), settings.max_grad_norm)
        learning_rate = float(optimizer.param_groups[0]["lr"])
        replay_gap = reports[0].replay_gap if reports else _mean([part.gap for part in parts])
        report = _report(
            parts, grad_norm=grad_norm, learning_rate=learning_rate, replay_gap=replay_gap
        )
        if not report.is_skipped and grad_norm != 0:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        reports.append(report)
    return reports


def _micro_batches(
    policy: PolicyForUpdate, experience: Experience, settings: UpdateSettings
) -> list[_MicroBatch]:
    old_log_probs = experience.rollout.log_probs.flatten(0, 1)
    advantages = experience.advantages.values.flatten()
    micro_batches = []
    for rows in torch.split(torch.arange(len(advantages)), settings.micro_batch_size):
        reference_log_probs = None
        if settings.loss.kl_coef != 0:
            with torch.no_grad():
                reference_log_probs = policy.reference_log_probs(experience, rows)
        micro_batches.append(
            _MicroBatch(
                rows=rows,
                old_log_probs=old_log_probs[rows],
                advantages=advantages[rows],
                reference_log_probs=reference_log_probs,
                share=len(rows) / len(advantages),
            )
        )
    return micro_batches


def _score(
    policy: PolicyForUpdate,
    experience: Experience,
    micro_batch: _MicroBatch,
    settings: LossSettings,
    backward: Callable[[Tensor], None],
) -> _Scored:
    """Replay, take the loss, accumulate its gradient; drop the graph before the next one."""
    replay = policy.replay(experience, micro_batch.rows)
    device = replay.log_probs.device
    old_log_probs = micro_batch.old_log_probs.to(device)
    loss = grpo_loss(
        replay.log_probs,
        old_log_probs,
        micro_batch.reference_log_probs,
        micro_batch.advantages.to(device),
        settings,
    )
    backward(loss.total * micro_batch.share)
    log_probs = replay.log_probs.detach()
    surrogate = replace(loss.surrogate, loss=loss.surrogate.loss.detach())
    return _Scored(
        share=micro_batch.share,
        loss=replace(loss, total=loss.total.detach(), surrogate=surrogate),
        replay=Replay(log_probs=log_probs, entropy=replay.entropy.detach()),
        gap=(log_probs - old_log_probs).abs(),
    )


def _clip_gradient(parameters: Sequence[nn.Parameter], max_grad_norm: float | None) -> float:
    """Clip in place; returns the norm before clipping."""
    limit = math.inf if max_grad_norm is None else max_grad_norm
    return float(nn.utils.clip_grad_norm_(parameters, limit))


def _report(
    parts: list[_Scored], *, grad_norm: float, learning_rate: float, replay_gap: float
) -> LossReport:
    def weigh(values: list[Tensor]) -> float:
        return float(sum(part.share * value for part, value in zip(parts, values, strict=True)))

    total = weigh([part.loss.total for part in parts])
    ratios = [part.loss.surrogate.ratio for part in parts]
    return LossReport(
        total=total,
        policy=weigh([part.loss.policy for part in parts]),
        kl=weigh([part.loss.kl for part in parts]),
        kl_reference=weigh([part.loss.kl_reference for part in parts]),
        kl_behaviour=weigh([part.loss.kl_behaviour for part in parts]),
        ratio_mean=_mean(ratios),
        clip_fraction=_mean([part.loss.surrogate.is_clipped.float() for part in parts]),
        effective_sample_size=float(effective_sample_size(torch.cat(ratios))),
        entropy=_mean([part.replay.entropy for part in parts]),
        log_prob=_mean([part.replay.log_probs for part in parts]),
        replay_gap=replay_gap,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        is_skipped=not (math.isfinite(total) and math.isfinite(grad_norm)),
    )


def _mean(values: list[Tensor]) -> float:
    return float(torch.cat(values).mean())
