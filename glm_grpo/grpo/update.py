"""The optimizer updates of one rollout, for any policy that can replay its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from glm_grpo.types import Correction, Experience, LossReport, PromptBatch, Rollout


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
        self, prompts: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
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


@runtime_checkable
class Engine(Protocol):
    """Joins the gradients and figures of the processes that train one policy together.

    Each of them replays its own sequences; gradients are averaged over the processes.
    """

    @property
    def num_processes(self) -> int:
        """How many there are."""
        ...

    def accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward pass of a micro-batch; gradients are joined by the last."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar."""
        ...

    def clip_gradient(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale the joined gradient down to an L2 norm; returns the norm before that."""
        ...

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every process's values, in the order of processes."""
        ...


class OneProcess:
    """The engine of plain torch."""

    num_processes = 1

    def accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """There is nothing to join."""
        del is_last
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar."""
        torch.autograd.backward(loss)

    def clip_gradient(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale the gradient down to an L2 norm; returns the norm before that."""
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Those of this process."""
        return [list(values)]


ONE_PROCESS = OneProcess()


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
    """Some rows of the experience.

    Attributes:
        rows: Into the flattened P * G axis.
        old_log_probs: As sampled.
        advantages: Of the rows.
        reference_log_probs: None where the loss does not weigh them.
        correction: None where the policy that sampled is the one that the updates begin with.
        share: Part of the tokens of all processes; 0 for a row that stands in where this process
            has fewer micro-batches than another, since all must call the model equally often.
    """

    rows: Int64[Tensor, " N"]
    old_log_probs: Float32[Tensor, "N T"]
    advantages: Float32[Tensor, " N"]
    reference_log_probs: Float32[Tensor, "N T"] | None
    correction: Correction | None
    share: float


@dataclass(frozen=True)
class _Scored:
    """What one micro-batch leaves for the report, without gradient."""

    share: float
    loss: GrpoLoss
    replay: Replay
    gap: Float32[Tensor, "N T"]


def update_policy(
    policy: PolicyForUpdate,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    experience: Experience,
    settings: UpdateSettings,
    engine: Engine = ONE_PROCESS,
) -> list[LossReport]:
    """Learn from one rollout: `updates_per_rollout` updates, each on the whole batch.

    Every update replays all sequences in micro-batches whose accumulated gradient is that of the
    whole batch. Ratios are always to the log-probs as sampled, or where the policy has moved on
    since then to those of the experience's correction. Reference log-probs are those of the
    experience, else computed once, before the first update, and not at all when the loss has no KL
    to the reference.

    The optimizer does not step, and no weight changes, when

    - the loss or the gradient norm is not finite: the report says `is_skipped` and keeps the
      values as they are;
    - the gradient is exactly zero, as it is when all advantages are 0 and no KL term is weighed:
      momentum and weight decay would move weights on no evidence. This is no failure, so
      `is_skipped` is False. It is decided on the gradient because processes that train together
      share that: one flat batch among several must not part them.

    Processes that train together each bring a part of the batch, of at least one sequence: losses
    are weighed by the number of all sequences, and every process returns the same reports.

    The schedule advances in any case: the learning rate is a function of how many updates were
    asked for, and runs that differ in a skipped update stay comparable.

    Args:
        policy: Replays tokens; see `PolicyForUpdate`.
        optimizer: Over the policy's trainable parameters.
        schedule: Of the learning rate, advanced once an update.
        experience: One batch with its rollout and advantages.
        settings: Plain values.
        engine: Joins the processes that train together.

    Returns:
        One report an update; `kl_reference` is NaN where no reference was run. `replay_gap` is
        that of the first update, before any step: it measures replay against sampling, not
        learning; NaN where the policy has moved on since it sampled.
    """
    micro_batches = _micro_batches(policy, experience, settings, engine)
    max_norm = math.inf if settings.max_grad_norm is None else settings.max_grad_norm
    reports: list[LossReport] = []
    for _ in range(settings.updates_per_rollout):
        optimizer.zero_grad(set_to_none=True)
        parts = []
        for index, micro_batch in enumerate(micro_batches):
            with engine.accumulation(is_last=index == len(micro_batches) - 1):
                parts.append(_score(policy, experience, micro_batch, settings.loss, engine))
        grad_norm = engine.clip_gradient(policy.trainable_parameters(), max_norm)
        report = _report(
            _sums(parts, engine),
            grad_norm=grad_norm,
            learning_rate=float(optimizer.param_groups[0]["lr"]),
            first=reports[0] if reports else None,
        )
        if not report.is_skipped and grad_norm != 0:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        reports.append(report)
    return reports


def _micro_batches(
    policy: PolicyForUpdate, experience: Experience, settings: UpdateSettings, engine: Engine
) -> list[_MicroBatch]:
    old_log_probs = experience.rollout.log_probs.flatten(0, 1)
    advantages = experience.advantages.values.flatten()
    sizes = [int(size) for (size,) in engine.gather([float(len(advantages))])]
    total = sum(sizes)
    groups = [*torch.split(torch.arange(len(advantages)), settings.micro_batch_size)]
    shares = [len(rows) / total for rows in groups]
    num_missing = math.ceil(max(sizes) / settings.micro_batch_size) - len(groups)
    groups += [groups[0][:1]] * num_missing
    shares += [0.0] * num_missing
    micro_batches = []
    for rows, share in zip(groups, shares, strict=True):
        reference_log_probs = None
        if settings.loss.kl_coef != 0:
            with torch.no_grad():
                reference_log_probs = _reference_log_probs(policy, experience, rows)
        micro_batches.append(
            _MicroBatch(
                rows=rows,
                old_log_probs=old_log_probs[rows],
                advantages=advantages[rows],
                reference_log_probs=reference_log_probs,
                correction=_correction(experience, rows),
                share=share,
            )
        )
    return micro_batches


def _reference_log_probs(
    policy: PolicyForUpdate, experience: Experience, rows: Int64[Tensor, " N"]
) -> Float32[Tensor, "N T"]:
    if experience.reference_log_probs is None:
        return policy.reference_log_probs(experience.prompts, experience.rollout, rows)
    return experience.reference_log_probs.flatten(0, 1)[rows]


def _correction(experience: Experience, rows: Int64[Tensor, " N"]) -> Correction | None:
    correction = experience.correction
    if correction is None:
        return None
    return Correction(
        proximal_log_probs=correction.proximal_log_probs.flatten(0, 1)[rows],
        weights=correction.weights.flatten(0, 1)[rows],
    )


def _moved(correction: Correction | None, device: torch.device) -> Correction | None:
    if correction is None:
        return None
    return Correction(correction.proximal_log_probs.to(device), correction.weights.to(device))


def _score(
    policy: PolicyForUpdate,
    experience: Experience,
    micro_batch: _MicroBatch,
    settings: LossSettings,
    engine: Engine,
) -> _Scored:
    """Replay, take the loss, accumulate its gradient; drop the graph before the next one."""
    replay = policy.replay(experience, micro_batch.rows)
    device = replay.log_probs.device
    old_log_probs = micro_batch.old_log_probs.to(device)
    reference = micro_batch.reference_log_probs
    loss = grpo_loss(
        replay.log_probs,
        old_log_probs,
        None if reference is None else reference.to(device),
        micro_batch.advantages.to(device),
        settings,
        _moved(micro_batch.correction, device),
    )
    # Gradients are averaged over the processes, while shares add up to 1 over all of them.
    engine.backward(loss.total * (micro_batch.share * engine.num_processes))
    log_probs = replay.log_probs.detach()
    surrogate = replace(loss.surrogate, loss=loss.surrogate.loss.detach())
    return _Scored(
        share=micro_batch.share,
        loss=replace(loss, total=loss.total.detach(), surrogate=surrogate),
        replay=Replay(log_probs=log_probs, entropy=replay.entropy.detach()),
        gap=_replay_gap(log_probs, old_log_probs, micro_batch.correction),
    )


def _replay_gap(
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    correction: Correction | None,
) -> Float32[Tensor, "N T"]:
    # A policy that has moved on since it sampled differs for that reason, and says nothing of how
    # well replay repeats sampling.
    if correction is not None:
        return torch.full_like(log_probs, torch.nan)
    return (log_probs - old_log_probs).abs()


def _sums(parts: Sequence[_Scored], engine: Engine) -> dict[str, float]:
    """Over the sequences of all processes: means, and sums over tokens."""
    rows = [_weigh(part) for part in parts if part.share > 0]
    own = torch.tensor([[*row.values()] for row in rows], dtype=torch.float64).sum(dim=0)
    everyone = torch.tensor(engine.gather(own.tolist()), dtype=torch.float64).sum(dim=0)
    return dict(zip(rows[0], everyone.tolist(), strict=True))


def _weigh(part: _Scored) -> dict[str, float]:
    loss, replay, ratio = part.loss, part.replay, part.loss.surrogate.ratio.double()
    means = {
        "total": loss.total,
        "policy": loss.policy,
        "kl": loss.kl,
        "kl_reference": loss.kl_reference,
        "kl_behaviour": loss.kl_behaviour,
        "ratio_mean": ratio.mean(),
        "clip_fraction": loss.surrogate.is_clipped.double().mean(),
        "entropy": replay.entropy.double().mean(),
        "log_prob": replay.log_probs.double().mean(),
        "replay_gap": part.gap.double().mean(),
    }
    return {
        **{name: part.share * float(mean) for name, mean in means.items()},
        "ratio_sum": float(ratio.sum()),
        "square_sum": float(ratio.square().sum()),
        "num_tokens": float(ratio.numel()),
    }


def _report(
    sums: Mapping[str, float],
    *,
    grad_norm: float,
    learning_rate: float,
    first: LossReport | None,
) -> LossReport:
    """`first` is of the first update of the rollout; None where this is it."""
    return LossReport(
        total=sums["total"],
        policy=sums["policy"],
        kl=sums["kl"],
        kl_reference=sums["kl_reference"],
        kl_behaviour=sums["kl_behaviour"],
        ratio_mean=sums["ratio_mean"],
        clip_fraction=sums["clip_fraction"],
        effective_sample_size=effective_sample_size(
            sums["ratio_sum"], sums["square_sum"], int(sums["num_tokens"])
        ),
        entropy=sums["entropy"],
        log_prob=sums["log_prob"],
        replay_gap=sums["replay_gap"] if first is None else first.replay_gap,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        is_skipped=not (math.isfinite(sums["total"]) and math.isfinite(grad_norm)),
    )
