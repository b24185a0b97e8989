"""Run the optimizer updates of one rollout, for any policy that can replay its tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.optim import Optimizer

from glm_grpo.config.losses import AnyLoss
from glm_grpo.config.sections import TrainSection
from glm_grpo.grpo.learning_rate import LearningRate
from glm_grpo.grpo.loss_scale import LossScale
from glm_grpo.grpo.losses import LossInputs, Mismatch, grpo_loss, measure_mismatch
from glm_grpo.grpo.minibatches import MicroBatch, split_experience, split_targets
from glm_grpo.grpo.old_log_probs import OldLogProbs
from glm_grpo.grpo.policy import PolicyForUpdate, Replay
from glm_grpo.grpo.strategy import Strategy
from glm_grpo.grpo.supervised import SFT_METRICS, learn_targets
from glm_grpo.grpo.update_metrics import (
    LossTerm,
    by_stage,
    join_parts,
    refuse_other_metrics,
    weighted,
)
from glm_grpo.types import Experience, ProgressCallback, TargetTokens, no_progress


@dataclass(frozen=True)
class Learner:
    """A policy, and what updates it.

    Attributes:
        optimizer: Optimizer over the policy's trainable parameters.
        learning_rate: Sets the optimizer's rate; advanced once per update.
        strategy: Joins the processes that train together; by default there is one.
        max_grad_norm: L2 norm to which the gradient is clipped, > 0; by default it is not.
    """

    policy: PolicyForUpdate
    optimizer: Optimizer
    learning_rate: LearningRate
    strategy: Strategy = field(default_factory=Strategy)
    max_grad_norm: float = math.inf


@dataclass(frozen=True)
class UpdateReport:
    """Report of one optimizer update.

    Attributes:
        loss: Loss that was minimised.
        grad_norm: L2 norm of its gradient before clipping.
        metrics: Metrics by the name they are stored under: loss and gradient norm among them,
            those of the loss, averaged over all tokens, of the policy, and of the optimizer.
        is_skipped: Whether loss or gradient was not finite, so that no weight changed.
    """

    loss: float
    grad_norm: float
    metrics: Mapping[str, float]
    is_skipped: bool


def update_policy(
    learner: Learner,
    experience: Experience,
    loss: AnyLoss,
    train: TrainSection,
    targets: TargetTokens | None = None,
    on_progress: ProgressCallback = no_progress,
) -> list[UpdateReport]:
    """Learn from one rollout: `epochs_per_rollout` passes, an update for each minibatch of each.

    A minibatch has every k-th prompt of the batch, counted over all processes, with k =
    `minibatches`; with 1 it is the whole batch. Discarded groups are excluded. Every
    update replays its sequences in micro-batches whose accumulated gradient is that of the whole
    minibatch.

    Ratios are relative to the policy that the updates begin with, as replay scores it. The first
    update takes its own log-probs, so that its ratios are exactly 1. Sequences of the other
    minibatches, which the policy sees only when it has moved, are replayed once more before that.
    The sampler computes the same log-probs in another way, and may have older weights: importance
    weights correct for the difference, and the metrics `mismatch/...` measure it.
    Source: the same pass, TRL's `GRPOTrainer`; two old policies, Hilton et al. 2022
    (arXiv 2110.00641).

    The optimizer does not step, and no weight changes, if

    - the loss or the gradient norm is not finite: the report sets `is_skipped` and keeps the
      values;
    - there is nothing to learn: the gradient is exactly zero, as when all advantages are 0 and no
      KL term has a weight; or it is zero except for rounding, because all advantages are 0 and
      every KL term is to the policy itself. Momentum and weight decay would change weights without
      evidence, and Adam scales a gradient of rounding errors up to full steps. This is not a
      failure, so `is_skipped` is False. The decision uses values that all processes know, because
      one batch without advantages among several must not make them diverge.

    With `skip_zero_std` and a loss that weighs only advantages, sequences with advantage 0 are
    not replayed. The gradient is the same, bitwise if `micro_batch_size` divides the group size;
    replay metrics (ratios, entropy, ...) then cover only the replayed sequences.

    Processes that train together each contribute part of the batch, at least one sequence: losses
    are weighted by the number of all sequences, and every process returns the same reports.

    With `targets`, an SFT term is added to the loss of each minibatch that contains prompts with a
    target image: `weight` times the mean cross-entropy of their tokens, under the policy's
    distribution at the sampling temperature, without truncation.

    The schedule always advances: the learning rate is a function of the number of requested
    updates, so that runs that differ in a skipped update stay comparable.

    Args:
        experience: With log-probs under the reference, if the loss weighs a KL to it.
        train: Passes, minibatches, micro-batches and `skip_zero_std` are used.
        targets: Target images to learn from in addition; all processes have them, or none has.
        on_progress: Called after every micro-batch of sampled tokens.

    Returns:
        One report per update; `kl/reference` is NaN without a reference, and
        `policy/replay_gap` is NaN if an older policy sampled.
    """
    minibatches = split_experience(
        experience,
        learner.strategy,
        minibatches=train.minibatches,
        micro_batch_size=train.micro_batch_size,
        skips_zero_std=train.skip_zero_std and loss.weighs_advantages_alone,
    )
    supervised: list[list[MicroBatch]] = [[] for _ in minibatches]
    if targets is not None:
        supervised = split_targets(
            targets,
            learner.strategy,
            num_prompts=len(experience.trained_groups()),
            minibatches=train.minibatches,
            micro_batch_size=train.micro_batch_size,
        )
    samples = _Samples(experience, loss, OldLogProbs(experience.rollout))
    # The policy has moved when their own updates replay them.
    _replay_ahead(learner.policy, samples, minibatches[1:])
    progress = _Progress(on_progress, sum(map(len, minibatches)) * train.epochs_per_rollout)
    reports: list[UpdateReport] = []
    names: set[str] = set()
    # Whether the policy is still the one that sampled.
    is_on_policy = not experience.is_stale
    updates = [*zip(minibatches, supervised, strict=True)] * train.epochs_per_rollout
    for of_samples, of_targets in updates:
        accumulate = partial(
            _learn_minibatch, learner, samples, of_samples, targets, of_targets, progress
        )
        found = _joined_gradient(learner, accumulate)
        metrics = found.term.means
        names = names or {*metrics}
        refuse_other_metrics(metrics, names)
        is_noise = (
            is_on_policy
            and not of_targets
            and _is_noise_alone(experience, of_samples, loss, learner.strategy)
        )
        report, has_moved = _step_optimizer(learner, found, metrics, is_noise=is_noise)
        is_on_policy = is_on_policy and not has_moved
        reports.append(report)
    return reports


def _learn_minibatch(
    learner: Learner,
    samples: _Samples,
    of_samples: list[MicroBatch],
    targets: TargetTokens | None,
    of_targets: list[MicroBatch],
    progress: _Progress,
) -> LossTerm:
    """Accumulate the gradient of one minibatch: of its samples, and of its target images."""
    term = _learn_samples(
        learner, samples, of_samples, is_last_term=not of_targets, progress=progress
    )
    if targets is None:
        return term
    sft = learn_targets(learner.policy, learner.strategy, targets, of_targets)
    of_sft = {"sft/cross_entropy": sft.means["cross_entropy"], "sft/weight": targets.weight}
    return LossTerm(term.loss + sft.loss, {**term.means, **of_sft})


def policy_gradient(
    policy: PolicyForUpdate,
    experience: Experience,
    loss: AnyLoss,
    train: TrainSection,
    on_progress: ProgressCallback = no_progress,
    *,
    loss_scale: LossScale | None = None,
) -> list[Float32[Tensor, "..."]]:
    """Gradient of the loss of a whole experience at the policy's weights; nothing is updated.

    It is that of the first update of `update_policy` in a single process, before clipping, if
    there is one minibatch and no SFT term. Gradients that the parameters had are lost.

    Args:
        policy: Policy that replays tokens, usually the one that sampled.
        train: Micro-batches and `skip_zero_std` are used.
        loss_scale: Factor of the loss in the backward pass; None: 1.

    Returns:
        One tensor per trainable parameter, on the CPU.
    """
    strategy = Strategy(loss_scale)
    minibatches = split_experience(
        experience,
        strategy,
        minibatches=1,
        micro_batch_size=train.micro_batch_size,
        skips_zero_std=train.skip_zero_std and loss.weighs_advantages_alone,
    )
    parameters = policy.trainable_parameters()
    for parameter in parameters:
        parameter.grad = None
    (micro_batches,) = minibatches
    samples = _Samples(experience, loss, OldLogProbs(experience.rollout))
    for done, micro_batch in enumerate(micro_batches, start=1):
        _backward_samples(policy, strategy, samples, micro_batch)
        on_progress(done, len(micro_batches))
    strategy.loss_scale.unscale(parameters)
    gradient = []
    for parameter in parameters:
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient.append(found.detach().float().cpu())
        parameter.grad = None
    return gradient


def update_on_targets(
    learner: Learner, targets: TargetTokens, train: TrainSection, *, num_prompts: int
) -> list[UpdateReport]:
    """Supervised fine-tuning: learn only from target images, by the SFT term.

    Passes, minibatches, micro-batches, the schedule and the conditions for an optimizer step are
    those of `update_policy`. The cross-entropy is under the policy's distribution at the sampling
    temperature, without truncation.

    Args:
        train: As in `update_policy`, without `skip_zero_std`.
        num_prompts: Number of prompts in this process's batch, with or without a target image.

    Returns:
        One report per update; metrics are NaN, and the loss 0, if a minibatch has no target image.
    """
    minibatches = split_targets(
        targets,
        learner.strategy,
        num_prompts=num_prompts,
        minibatches=train.minibatches,
        micro_batch_size=train.micro_batch_size,
    )
    reports = []
    for micro_batches in minibatches * train.epochs_per_rollout:
        accumulate = partial(
            learn_targets, learner.policy, learner.strategy, targets, micro_batches
        )
        found = _joined_gradient(learner, accumulate)
        metrics = {SFT_METRICS[name]: value for name, value in found.term.means.items()}
        report, _ = _step_optimizer(learner, found, metrics)
        reports.append(report)
    return reports


@dataclass(frozen=True)
class _Gradient:
    """What was minimised by the gradients that the parameters now have.

    Attributes:
        norm: L2 norm before clipping.
    """

    term: LossTerm
    norm: float


def _joined_gradient(learner: Learner, accumulate: Callable[[], LossTerm]) -> _Gradient:
    """Accumulate, join and clip a gradient; again with a lower loss scale if it overflows."""
    strategy = learner.strategy
    begun_with = strategy.loss_scale.value
    while True:
        learner.optimizer.zero_grad(set_to_none=True)
        term = accumulate()
        norm = strategy.clip_gradient(learner.policy.trainable_parameters(), learner.max_grad_norm)
        if math.isfinite(norm):
            strategy.loss_scale.note_finite()
        elif math.isfinite(term.loss) and strategy.loss_scale.lower():
            continue
        else:
            # No scale helps, so the next update need not begin with the lowest.
            strategy.loss_scale.value = begun_with
        return _Gradient(term, norm)


def _step_optimizer(
    learner: Learner,
    gradient: _Gradient,
    metrics: Mapping[str, float],
    *,
    is_noise: bool = False,
) -> tuple[UpdateReport, bool]:
    """Step, unless loss or gradient is not finite or nothing is learned; advance the schedule.

    Returns:
        The report, and whether the weights changed.
    """
    optimizer, loss, grad_norm = learner.optimizer, gradient.term.loss, gradient.norm
    metrics = {
        **metrics,
        "loss/total": loss,
        "optim/grad_norm": grad_norm,
        "optim/learning_rate": float(optimizer.param_groups[0]["lr"]),
    }
    if learner.strategy.loss_scale.is_used:
        metrics["optim/loss_scale"] = learner.strategy.loss_scale.value
    is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
    is_learning = is_finite and grad_norm != 0 and not is_noise
    if is_learning:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    learner.learning_rate.step()
    return UpdateReport(loss, grad_norm, metrics, is_skipped=not is_finite), is_learning


def _is_noise_alone(
    experience: Experience,
    micro_batches: Sequence[MicroBatch],
    loss: AnyLoss,
    strategy: Strategy,
) -> bool:
    """Whether the gradient of an unchanged policy consists only of rounding errors.

    Log-probs computed with and without gradient, or in other blocks of rows, differ in their last
    bits. A KL to the policy itself therefore has a gradient that is not exactly 0.
    """
    is_learned_from = experience.is_learned_from().flatten()
    is_varied = any(
        bool(is_learned_from[each.rows].any()) for each in micro_batches if each.fraction > 0
    )
    if any(strategy.gather(is_varied)):
        return False
    is_to_itself = experience.is_sampled_by_reference or loss.kl_coef_in_loss == 0
    return loss.weighs_no_more_than_kl and is_to_itself


@dataclass(frozen=True)
class _Samples:
    """Sampled tokens, and what their loss is computed from."""

    experience: Experience
    loss: AnyLoss
    old_log_probs: OldLogProbs


@dataclass
class _Progress:
    """Counts micro-batches of sampled tokens.

    Attributes:
        total: Number of them in all updates.
    """

    on_progress: ProgressCallback
    total: int
    done: int = 0

    def advance(self) -> None:
        # A gradient that overflowed is computed again.
        self.done = min(self.done + 1, self.total)
        self.on_progress(self.done, self.total)


@torch.no_grad()
def _replay_ahead(
    policy: PolicyForUpdate, samples: _Samples, minibatches: Sequence[Sequence[MicroBatch]]
) -> None:
    """Compute the old log-probs of minibatches before the policy moves."""
    experience = samples.experience
    for micro_batch in itertools.chain.from_iterable(minibatches):
        rows = micro_batch.rows
        replay = policy.replay(experience.prompts, experience.rollout, rows)
        # Row 0 of a stand-in is stored by the micro-batch that it belongs to.
        if micro_batch.fraction > 0:
            samples.old_log_probs.fill(rows, replay.log_probs)


def _learn_samples(
    learner: Learner,
    samples: _Samples,
    micro_batches: Sequence[MicroBatch],
    *,
    is_last_term: bool,
    progress: _Progress,
) -> LossTerm:
    parts = []
    for micro_batch in micro_batches:
        is_last = is_last_term and micro_batch is micro_batches[-1]
        with learner.strategy.accumulation(is_last=is_last):
            parts.append(_backward_samples(learner.policy, learner.strategy, samples, micro_batch))
        refuse_other_metrics(parts[-1].means, parts[0].means)
        progress.advance()
    replayed = [
        part
        for part, micro_batch in zip(parts, micro_batches, strict=True)
        if micro_batch.replayed_fraction > 0
    ]
    return join_parts(replayed, [*parts[0].means], learner.strategy)


def _backward_samples(
    policy: PolicyForUpdate, strategy: Strategy, samples: _Samples, micro_batch: MicroBatch
) -> LossTerm:
    """Replay, compute the loss, and accumulate its gradient; free the graph before the next one.

    Returns:
        The micro-batch's part of the loss and its metrics: the loss and its terms weighted by its
        fraction of all tokens, the others by its fraction of the replayed tokens.
    """
    experience = samples.experience
    replay = policy.replay(experience.prompts, experience.rollout, micro_batch.rows)
    log_probs = replay.log_probs.detach()
    # Changes nothing after the first update, which takes the log-probs of its own replay.
    samples.old_log_probs.fill(micro_batch.rows, log_probs)
    inputs, mismatch = _loss_inputs(samples, micro_batch.rows, replay)
    output = grpo_loss(inputs, samples.loss)
    # Gradients are averaged over the processes, but fractions add up to 1 over all of them.
    strategy.backward(output.total * (micro_batch.fraction * strategy.num_processes))
    # What an older policy differs by says nothing about how well replay repeats sampling.
    gap = torch.full_like(log_probs, torch.nan) if experience.is_stale else mismatch.gap
    metrics = {
        **output.metrics,
        **mismatch.metrics,
        "policy/entropy": replay.entropy.detach(),
        "policy/log_prob": log_probs,
        "policy/outside_codebook": replay.outside_codebook,
        "policy/replay_gap": gap,
    }
    metrics = {**metrics, **by_stage(metrics, replay.num_preview)}
    means = {
        **weighted(metrics, micro_batch.replayed_fraction),
        **weighted(output.terms, micro_batch.fraction),
    }
    return LossTerm(micro_batch.fraction * float(output.total.detach().double()), means)


def _loss_inputs(
    samples: _Samples, rows: Int64[Tensor, " N"], replay: Replay
) -> tuple[LossInputs, Mismatch]:
    def of_rows(values: Tensor) -> Tensor:
        return values.flatten(0, 1)[rows].to(replay.log_probs.device)

    experience, loss = samples.experience, samples.loss
    reference = experience.reference_log_probs
    old = samples.old_log_probs.of_rows(rows).to(replay.log_probs.device)
    sampling = of_rows(experience.rollout.log_probs)
    mismatch = measure_mismatch(
        old,
        sampling,
        weights=loss.importance_weights,
        largest=loss.max_importance_ratio,
        smallest=loss.min_importance_ratio or 0.0,
    )
    inputs = LossInputs(
        log_probs=replay.log_probs,
        old_log_probs=old,
        # With the KL in the reward they are available, and are measured.
        reference_log_probs=None if reference is None else of_rows(reference),
        advantages=of_rows(experience.advantages),
        sampling_log_probs=sampling,
        importance_weights=mismatch.weights,
        entropy=replay.entropy,
        num_preview=replay.num_preview,
    )
    return inputs, mismatch
