"""Run the optimizer updates of one rollout, for any policy that can replay its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from glm_grpo.errors import ConfigError
from glm_grpo.grpo.losses import Loss, LossInputs, effective_sample_size, grpo_loss
from glm_grpo.grpo.strategy import SINGLE_PROCESS, Strategy
from glm_grpo.types import (
    Count,
    Examples,
    Experience,
    OffPolicyCorrection,
    PromptBatch,
    Rollout,
    not_counted,
)


@dataclass(frozen=True)
class Replay:
    """The policy's current scores of tokens that were sampled before.

    Attributes:
        log_probs: Log-probabilities (natural) under the distribution the tokens were drawn from;
            with gradient.
        entropy: Entropy of that distribution at each token, nats; with gradient if the policy was
            built to provide one.
        outside_codebook: Total probability of tokens that are not part of an image, which sampling
            and replay exclude, in [0, 1).
        num_preview: Number of preview tokens at the start of each sequence; 0 if there is no
            preview.
    """

    log_probs: Float32[Tensor, "N T"]
    entropy: Float32[Tensor, "N T"]
    outside_codebook: Float32[Tensor, "N T"]
    num_preview: int = 0


@runtime_checkable
class PolicyForUpdate(Protocol):
    """What an update needs from a policy. Rows index the flattened P * G axis."""

    def replay(self, prompts: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]) -> Replay:
        """Score the tokens of these rows, with gradient."""
        ...

    def reference_log_probs(
        self, prompts: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N T"]:
        """Score the tokens of these rows under the reference policy, without gradient."""
        ...

    def trainable_parameters(self) -> Sequence[nn.Parameter]:
        """Parameters that the optimizer updates, and whose gradient is clipped."""
        ...


@runtime_checkable
class LearningRateSchedule(Protocol):
    """Sets the optimizer's learning rate."""

    def step(self) -> None:
        """Advance by one update."""
        ...


@dataclass(frozen=True)
class UpdateSettings:
    """How to train on one rollout.

    Attributes:
        loss: Loss to minimise.
        max_grad_norm: L2 norm to which the gradient is clipped, > 0; None: no clipping.
        micro_batch_size: Sequences replayed at once, >= 1; changes memory, not the gradient.
        updates_per_rollout: Passes over the same tokens, >= 1.
        minibatches_per_rollout: Optimizer updates per pass, each on part of the prompts, >= 1.
        is_skipping_flat: Whether to skip sequences with advantage 0 if nothing else weighs them.
    """

    loss: Loss
    max_grad_norm: float | None
    micro_batch_size: int
    updates_per_rollout: int
    minibatches_per_rollout: int = 1
    is_skipping_flat: bool = False


@dataclass(frozen=True)
class UpdateReport:
    """Report of one optimizer update.

    Attributes:
        metrics: Metrics by the name they are stored under: those of the loss, averaged over all
            tokens, of the policy, and of the optimizer.
        is_skipped: Whether loss or gradient was not finite, so that no weight changed.
    """

    metrics: Mapping[str, float]
    is_skipped: bool


@dataclass(frozen=True)
class _MicroBatch:
    """Some rows of the experience.

    Attributes:
        rows: Indices into the flattened P * G axis.
        old_log_probs: Log-probs as sampled.
        advantages: Advantages of the rows.
        reference_log_probs: Log-probs under the reference; None if nothing weighs them.
        correction: Off-policy correction; None if the updates begin with the policy that sampled.
        share: Fraction of the minibatch's tokens, over all processes; 0 for a dummy row where this
            process has fewer micro-batches than another, because all must call the model equally
            often.
        replayed_share: Fraction of the replayed tokens; equals `share` if none is skipped.
    """

    rows: Int64[Tensor, " N"]
    old_log_probs: Float32[Tensor, "N T"]
    advantages: Float32[Tensor, " N"]
    reference_log_probs: Float32[Tensor, "N T"] | None
    correction: OffPolicyCorrection | None
    share: float
    replayed_share: float


@dataclass(frozen=True)
class _ExamplePass:
    """Some of the target examples.

    Attributes:
        rows: Indices into the prompts of the examples.
        share: Fraction of the tokens of all examples in the minibatch, over all processes; 0 for a
            dummy row, see `_MicroBatch`.
    """

    rows: Int64[Tensor, " N"]
    share: float


def update_policy(
    policy: PolicyForUpdate,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    experience: Experience,
    settings: UpdateSettings,
    strategy: Strategy = SINGLE_PROCESS,
    anchor: Examples | None = None,
    count: Count = not_counted,
) -> list[UpdateReport]:
    """Learn from one rollout: `updates_per_rollout` passes, an update for each minibatch of each.

    A minibatch has every k-th prompt of the batch, counted over all processes, with k =
    `minibatches_per_rollout`; with 1 it is the whole batch. Discarded groups are excluded. Every
    update replays its sequences in micro-batches whose accumulated gradient is that of the whole
    minibatch. Ratios are relative to the sampled log-probs or, if the policy has changed since
    sampling, to the proximal log-probs of the experience's correction. Reference log-probs come
    from the experience; otherwise they are computed once, before the first update, and only if the
    loss has a KL to the reference.

    The optimizer does not step, and no weight changes, if

    - the loss or the gradient norm is not finite: the report sets `is_skipped` and keeps the
      values;
    - there is nothing to learn: the gradient is exactly zero, as when all advantages are 0 and no
      KL term has a weight; or it is zero except for rounding, because all advantages are 0 and
      every KL term is to the policy itself. Momentum and weight decay would change weights without
      evidence, and Adam scales a gradient of rounding errors up to full steps. This is not a
      failure, so `is_skipped` is False. The decision uses values that all processes know, because
      one flat batch among several must not make them diverge.

    With `is_skipping_flat` and a loss that weighs only advantages, sequences with advantage 0 are
    not replayed. The gradient is the same, bitwise if `micro_batch_size` divides the group size;
    replay metrics (ratios, entropy, ...) then cover only the replayed sequences.

    Processes that train together each contribute part of the batch, at least one sequence: losses
    are weighted by the number of all sequences, and every process returns the same reports.

    With an anchor, `weight` times the mean cross-entropy of its tokens is added to the loss of each
    minibatch that contains its prompts. The cross-entropy is under the policy's distribution at the
    sampling temperature, without truncation.

    The schedule always advances: the learning rate is a function of the number of requested
    updates, so that runs that differ in a skipped update stay comparable.

    Args:
        policy: Policy that replays tokens; see `PolicyForUpdate`.
        optimizer: Optimizer over the policy's trainable parameters.
        schedule: Learning-rate schedule, advanced once per update.
        experience: One batch with its rollout and advantages.
        settings: Plain values.
        strategy: Joins the processes that train together.
        anchor: Additional examples to learn from; all processes have one, or none has.
        count: Called after every micro-batch of sampled tokens.

    Returns:
        One report per update; `kl/reference` is NaN if no reference was run. `policy/replay_gap` is
        the first update's, before any step, so that it compares replay with sampling and excludes
        learning; NaN if the policy has changed since it sampled.
    """
    minibatches = [
        _micro_batches(policy, experience, rows, settings, strategy)
        for rows in _minibatch_rows(experience, settings.minibatches_per_rollout, strategy)
    ]
    num_prompts = len(experience.trained_rows())
    anchored = (
        [[] for _ in minibatches]
        if anchor is None
        else _example_passes(anchor, num_prompts, settings, strategy)
    )
    reports: list[UpdateReport] = []
    # Whether the policy is still the one that sampled.
    is_on_policy = experience.correction is None
    total = sum(map(len, minibatches)) * settings.updates_per_rollout
    done = 0
    names: list[str] = []
    for micro_batches, examples in [
        *zip(minibatches, anchored, strict=True)
    ] * settings.updates_per_rollout:
        optimizer.zero_grad(set_to_none=True)
        parts = []
        for index, micro_batch in enumerate(micro_batches):
            is_last = not examples and index == len(micro_batches) - 1
            with strategy.accumulation(is_last=is_last):
                parts.append(_score(policy, experience, micro_batch, settings.loss, strategy))
            names = names or [*parts[0]]
            _refuse_other_metrics(parts[-1], names)
            done += 1
            count(done, total)
        learned = None
        if anchor is not None:
            learned = _learn_examples(policy, anchor, examples, strategy)
        grad_norm = _clip_gradient(policy, settings, strategy)
        counted = [
            part for part, each in zip(parts, micro_batches, strict=True) if each.replayed_share > 0
        ]
        metrics = _means(counted, names, strategy)
        if anchor is not None and learned is not None:
            if examples:
                metrics["loss/total"] += anchor.weight * learned["cross_entropy"]
            metrics |= {
                "anchor/cross_entropy": learned["cross_entropy"],
                "anchor/weight": anchor.weight,
            }
        if reports:
            metrics["policy/replay_gap"] = reports[0].metrics["policy/replay_gap"]
        is_noise = (
            is_on_policy
            and not examples
            and _is_noise_alone(experience, micro_batches, settings.loss, strategy)
        )
        report = _take_step(optimizer, schedule, metrics, grad_norm, is_noise=is_noise)
        is_on_policy = is_on_policy and (is_noise or grad_norm == 0 or report.is_skipped)
        reports.append(report)
    return reports


def update_on_examples(
    policy: PolicyForUpdate,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    examples: Examples,
    settings: UpdateSettings,
    strategy: Strategy = SINGLE_PROCESS,
    *,
    num_prompts: int,
) -> list[UpdateReport]:
    """Learn only from token grids: supervised fine-tuning by their mean cross-entropy.

    Passes, minibatches, micro-batches, the schedule and the conditions for an optimizer step are
    those of `update_policy`. The cross-entropy is under the policy's distribution at the sampling
    temperature, without truncation.

    Args:
        settings: `loss` and `is_skipping_flat` are ignored.
        num_prompts: Number of prompts in this process's batch, including those without an example.

    Returns:
        One report per update; metrics are NaN, and the loss 0, if a minibatch has no example.
    """
    reports = []
    for passes in (
        _example_passes(examples, num_prompts, settings, strategy) * settings.updates_per_rollout
    ):
        optimizer.zero_grad(set_to_none=True)
        learned = _learn_examples(policy, examples, passes, strategy)
        grad_norm = _clip_gradient(policy, settings, strategy)
        metrics = {
            "loss/total": examples.weight * learned["cross_entropy"] if passes else 0.0,
            **{f"{_LEARNED_AS[name]}": value for name, value in learned.items()},
        }
        reports.append(_take_step(optimizer, schedule, metrics, grad_norm))
    return reports


_LEARNED_AS = {
    "cross_entropy": "sft/cross_entropy",
    "cross_entropy/preview": "sft/cross_entropy/preview",
    "cross_entropy/target": "sft/cross_entropy/target",
    "entropy": "policy/entropy",
    "outside_codebook": "policy/outside_codebook",
}
"""Names of metrics by the key that `_learn_examples` returns."""


def _clip_gradient(policy: PolicyForUpdate, settings: UpdateSettings, strategy: Strategy) -> float:
    """Scale the gradient down to the largest allowed norm; returns the norm before."""
    max_norm = math.inf if settings.max_grad_norm is None else settings.max_grad_norm
    return strategy.clip_gradient(policy.trainable_parameters(), max_norm)


def _is_noise_alone(
    experience: Experience,
    micro_batches: Sequence[_MicroBatch],
    loss: Loss,
    strategy: Strategy,
) -> bool:
    """Whether the gradient of an unchanged policy consists only of rounding errors.

    Log-probs computed with and without gradient, or in other blocks of rows, differ in their last
    bits. A KL to the policy itself therefore has a gradient that is not exactly 0.
    """
    is_varied = any(bool((each.advantages != 0).any()) for each in micro_batches if each.share > 0)
    if any(others for (others,) in strategy.gather([float(is_varied)])):
        return False
    is_to_itself = experience.is_sampled_by_reference or loss.kl_coef_in_loss == 0
    return loss.weighs_no_more_than_kl and is_to_itself


def _take_step(
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    metrics: dict[str, float],
    grad_norm: float,
    *,
    is_noise: bool = False,
) -> UpdateReport:
    """Step, unless loss or gradient is not finite or nothing is learned; advance the schedule."""
    metrics = metrics | {
        "optim/grad_norm": grad_norm,
        "optim/learning_rate": float(optimizer.param_groups[0]["lr"]),
    }
    is_finite = math.isfinite(metrics["loss/total"]) and math.isfinite(grad_norm)
    if is_finite and grad_norm != 0 and not is_noise:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
    return UpdateReport(metrics, is_skipped=not is_finite)


def _minibatch_rows(
    experience: Experience, parts: int, strategy: Strategy
) -> list[Int64[Tensor, " N"]]:
    """Rows of each minibatch in this process, possibly none."""
    group_size = experience.advantages.values.shape[1]
    trained = experience.trained_rows()
    rows = (trained[:, None] * group_size + torch.arange(group_size)).flatten()
    if parts == 1:
        return [rows]
    # Every k-th prompt over all processes: each process has its part of each minibatch.
    count = [float(len(trained))]
    before = sum(int(others) for (others,) in strategy.gather(count)[: strategy.rank])
    prompts = torch.arange(len(trained)).repeat_interleave(group_size) + before
    return [rows[prompts % parts == part] for part in range(parts)]


def _example_passes(
    examples: Examples, num_prompts: int, settings: UpdateSettings, strategy: Strategy
) -> list[list[_ExamplePass]]:
    """Passes over the examples of each minibatch: as many as in each of the other processes."""
    parts = settings.minibatches_per_rollout
    before = sum(int(count) for (count,) in strategy.gather([float(num_prompts)])[: strategy.rank])
    passes = []
    for part in range(parts):
        own = ((examples.places + before) % parts == part).nonzero().flatten()
        counts = [int(count) for (count,) in strategy.gather([float(len(own))])]
        groups = [*own.split(settings.micro_batch_size)] if len(own) else []
        shares = [len(group) / sum(counts) for group in groups]
        stand_ins = math.ceil(max(counts) / settings.micro_batch_size) - len(groups)
        groups += [torch.zeros(1, dtype=torch.long)] * stand_ins
        shares += [0.0] * stand_ins
        passes.append([_ExamplePass(*each) for each in zip(groups, shares, strict=True)])
    return passes


def _learn_examples(
    policy: PolicyForUpdate,
    examples: Examples,
    passes: Sequence[_ExamplePass],
    strategy: Strategy,
) -> dict[str, float]:
    """Accumulate the gradient of the examples of a minibatch.

    Returns:
        Means over their tokens in all processes, in nats; NaN if there are none.
    """
    parts = []
    for index, each in enumerate(passes):
        with strategy.accumulation(is_last=index == len(passes) - 1):
            parts.append(_score_examples(policy, examples, each, strategy))
    if not parts:
        return dict.fromkeys(_LEARNED_AS, math.nan)
    own = [math.fsum(part[name] for part in parts) for name in parts[0]]
    everyone = zip(*strategy.gather(own), strict=True)
    return dict(zip(parts[0], map(math.fsum, everyone), strict=True))


def _score_examples(
    policy: PolicyForUpdate, examples: Examples, some: _ExamplePass, strategy: Strategy
) -> dict[str, float]:
    """Accumulate the gradient of some examples; returns their share of the means."""
    rollout = Rollout(
        token_ids=examples.token_ids.unsqueeze(1),
        log_probs=torch.zeros(len(examples.token_ids), 1, examples.token_ids.shape[1]),
        sampling_mask=None,
        policy_step=0,
    )
    replay = policy.replay(examples.prompts, rollout, some.rows)
    cross_entropy = -replay.log_probs.mean() * some.share
    strategy.backward(cross_entropy * (examples.weight * strategy.num_processes))
    nats = -replay.log_probs.detach()
    means = {
        "cross_entropy": nats,
        # NaN for images that are generated without a preview, such as edits.
        "cross_entropy/preview": nats[:, : replay.num_preview],
        "cross_entropy/target": nats[:, replay.num_preview :],
        "entropy": replay.entropy.detach(),
        "outside_codebook": replay.outside_codebook,
    }
    return {name: some.share * float(value.double().mean()) for name, value in means.items()}


def _micro_batches(
    policy: PolicyForUpdate,
    experience: Experience,
    rows: Int64[Tensor, " N"],
    settings: UpdateSettings,
    strategy: Strategy,
) -> list[_MicroBatch]:
    """Passes over some rows of this process: as many as in each of the others."""
    advantages = experience.advantages.values.flatten()
    replayed = rows
    if settings.is_skipping_flat and settings.loss.weighs_advantages_alone:
        replayed = rows[advantages[rows] != 0]
    own = [float(len(rows)), float(len(replayed))]
    sizes = [[int(size) for size in each] for each in strategy.gather(own)]
    total, num_replayed = (sum(each) for each in zip(*sizes, strict=True))
    if num_replayed == 0:
        # Everything is flat: one pass for the metrics, with a gradient of zero.
        replayed = rows[: settings.micro_batch_size]
        sizes = [[size, min(size, settings.micro_batch_size)] for size, _ in sizes]
        num_replayed = sum(size for _, size in sizes)
    groups = [*torch.split(replayed, settings.micro_batch_size)] if len(replayed) else []
    num_passes = math.ceil(max(size for _, size in sizes) / settings.micro_batch_size)
    stand_ins = num_passes - len(groups)
    counts = [len(group) for group in groups] + [0] * stand_ins
    groups += [torch.zeros(1, dtype=torch.long)] * stand_ins
    return [
        _micro_batch(
            policy,
            experience,
            group,
            settings.loss,
            share=count / total,
            replayed_share=count / num_replayed,
        )
        for group, count in zip(groups, counts, strict=True)
    ]


def _micro_batch(
    policy: PolicyForUpdate,
    experience: Experience,
    rows: Int64[Tensor, " N"],
    loss: Loss,
    *,
    share: float,
    replayed_share: float,
) -> _MicroBatch:
    reference_log_probs = None
    # With the KL in the reward they are available, and are measured.
    if loss.kl_coef_in_loss != 0 or experience.reference_log_probs is not None:
        with torch.no_grad():
            reference_log_probs = _reference_log_probs(policy, experience, rows)
    return _MicroBatch(
        rows=rows,
        old_log_probs=experience.rollout.log_probs.flatten(0, 1)[rows],
        advantages=experience.advantages.values.flatten()[rows],
        reference_log_probs=reference_log_probs,
        correction=_correction(experience, rows),
        share=share,
        replayed_share=replayed_share,
    )


def _reference_log_probs(
    policy: PolicyForUpdate, experience: Experience, rows: Int64[Tensor, " N"]
) -> Float32[Tensor, "N T"]:
    if experience.reference_log_probs is None:
        return policy.reference_log_probs(experience.prompts, experience.rollout, rows)
    return experience.reference_log_probs.flatten(0, 1)[rows]


def _correction(experience: Experience, rows: Int64[Tensor, " N"]) -> OffPolicyCorrection | None:
    correction = experience.correction
    if correction is None:
        return None
    return OffPolicyCorrection(
        proximal_log_probs=correction.proximal_log_probs.flatten(0, 1)[rows],
        weights=correction.weights.flatten(0, 1)[rows],
    )


def _moved(
    correction: OffPolicyCorrection | None, device: torch.device
) -> OffPolicyCorrection | None:
    if correction is None:
        return None
    return OffPolicyCorrection(
        correction.proximal_log_probs.to(device), correction.weights.to(device)
    )


def _score(
    policy: PolicyForUpdate,
    experience: Experience,
    micro_batch: _MicroBatch,
    settings: Loss,
    strategy: Strategy,
) -> dict[str, float]:
    """Replay, compute the loss, and accumulate its gradient; free the graph before the next one.

    Returns:
        Metrics weighted by the micro-batch's share of the tokens: loss metrics by its share of all
        tokens, the others by its share of the replayed tokens.
    """
    replay = policy.replay(experience.prompts, experience.rollout, micro_batch.rows)
    device = replay.log_probs.device
    old_log_probs = micro_batch.old_log_probs.to(device)
    reference = micro_batch.reference_log_probs
    inputs = LossInputs(
        log_probs=replay.log_probs,
        old_log_probs=old_log_probs,
        reference_log_probs=None if reference is None else reference.to(device),
        advantages=micro_batch.advantages.to(device),
        correction=_moved(micro_batch.correction, device),
        entropy=replay.entropy,
        num_preview=replay.num_preview,
    )
    loss = grpo_loss(inputs, settings)
    # Gradients are averaged over the processes, but shares add up to 1 over all of them.
    strategy.backward(loss.total * (micro_batch.share * strategy.num_processes))
    log_probs = replay.log_probs.detach()
    metrics = {
        **loss.metrics,
        "policy/entropy": replay.entropy.detach(),
        "policy/log_prob": log_probs,
        "policy/outside_codebook": replay.outside_codebook,
        "policy/replay_gap": _replay_gap(log_probs, old_log_probs, micro_batch.correction),
    }
    metrics = {**metrics, **_by_stage(metrics, replay.num_preview)}
    return {
        name: (micro_batch.share if name.startswith("loss/") else micro_batch.replayed_share)
        * float(value.double().mean())
        for name, value in metrics.items()
    }


def _refuse_other_metrics(metrics: Mapping[str, float], names: Sequence[str]) -> None:
    """Refuse varying metrics of a custom loss: a mean over the step needs them in every call."""
    for name in sorted({*metrics} ^ {*names}):
        raise ConfigError(
            f"loss.function: metric {name!r} was not reported by every call of a step; report the "
            "same metrics each time, torch.nan where one has no value: the step's mean is NaN then"
        )


_SHOWN_BY_STAGE = ("policy/entropy", "ratio/clip_fraction", "kl/reference_tokens")


def _by_stage(metrics: Mapping[str, Tensor], num_preview: int) -> dict[str, Tensor]:
    """Split token metrics into preview and target, for images that have both."""
    found = {}
    for name in _SHOWN_BY_STAGE:
        tokens = metrics.get(name)
        # A custom loss may report a scalar under this name.
        if tokens is not None and tokens.ndim == 2 and 0 < num_preview < tokens.shape[1]:
            found[f"{name.removesuffix('_tokens')}/preview"] = tokens[:, :num_preview]
            found[f"{name.removesuffix('_tokens')}/target"] = tokens[:, num_preview:]
    return found


def _means(
    parts: Sequence[Mapping[str, float]], names: Sequence[str], strategy: Strategy
) -> dict[str, float]:
    """Metrics over the sequences of all processes, from the weighted ones of micro-batches."""
    own = torch.tensor(
        [[part[name] for name in names] for part in parts], dtype=torch.float64
    ).reshape(len(parts), len(names))
    everyone = torch.tensor(strategy.gather(own.sum(dim=0).tolist()), dtype=torch.float64)
    means = dict(zip(names, everyone.sum(dim=0).tolist(), strict=True))
    means.pop("kl/reference_tokens", None)
    mean_square = means.pop("ratio/mean_square", None)
    if mean_square is not None:
        size = effective_sample_size(means["ratio/mean"], mean_square)
        means["ratio/effective_sample_size"] = size
    log_ratio = means.pop("ratio/sequence_log", None)
    if log_ratio is not None:
        variance = means.pop("ratio/sequence_log_square") - log_ratio**2
        means["ratio/sequence_std"] = math.sqrt(max(0.0, variance))
    return means


def _replay_gap(
    log_probs: Float32[Tensor, "N T"],
    old_log_probs: Float32[Tensor, "N T"],
    correction: OffPolicyCorrection | None,
) -> Float32[Tensor, "N T"]:
    # A policy that has changed since it sampled differs for that reason, which says nothing about
    # how well replay repeats sampling.
    if correction is not None:
        return torch.full_like(log_probs, torch.nan)
    return (log_probs - old_log_probs).abs()
