"""Compute metrics of training steps and evaluations; docs/reference/metrics.md explains them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from glm_grpo.grpo.update import UpdateReport
from glm_grpo.types import Evaluation, Experience
from rewards.audit import audit_table
from rewards.exact import EXACT, Exact
from rewards.refusals import find_refusals
from rewards.types import RewardTable
from rewards.weighting import Mode, contributions, placed_share


@dataclass(frozen=True)
class StepWork:
    """Operations that a run's models need for one image; 0 for phases that are not counted.

    Attributes:
        rollout: Sampling its tokens, including its part of reading the prompt.
        decode: Decoding it as in rollouts.
        update: Learning from it: all updates of a step, and the reference.
        peak_flops: Published operations per second of all devices of the run together.
        skips_zero_std: Whether images with advantage 0 are skipped in the update.
    """

    rollout: float
    decode: float
    update: float
    peak_flops: float
    skips_zero_std: bool


def step_metrics(
    experience: Experience,
    reports: Sequence[UpdateReport],
    times: Mapping[str, float],
    peak_memory_bytes: int,
    *,
    combine: Mode,
) -> dict[str, float]:
    """Compute all metrics of one training step.

    Standard deviations are those of the population of images. Loss metrics are means over the
    step's updates that were not skipped. NaN stands for undefined values, such as the mean of a
    term that applied to no prompt of the batch.

    Args:
        reports: One report per update of the step, in order, at least one.
        times: Seconds by phase: `rollout`, `decode`, `reward`, `update`, and `step` for the whole.
        peak_memory_bytes: Peak accelerator memory during the step; without an accelerator, the peak
            memory of the process.

    Returns:
        Metric name -> value.
    """
    images = experience.totals.numel()
    tokens = experience.rollout.token_ids.numel()
    return {
        **_reward_metrics(experience, combine),
        **_update_metrics(reports),
        **{f"time/{phase}": seconds for phase, seconds in times.items()},
        "throughput/images_per_second": images / times["step"],
        "throughput/tokens_per_second": tokens / times["rollout"],
        "memory/peak_bytes": float(peak_memory_bytes),
    }


def supervised_metrics(
    images: int,
    reports: Sequence[UpdateReport],
    times: Mapping[str, float],
    peak_memory_bytes: int,
) -> dict[str, float]:
    """Compute all metrics of a supervised step; names as in `step_metrics`.

    Args:
        images: Number of target images learned from, in all processes.
        reports: One report per update of the step, in order, at least one.
        times: Seconds by phase: `sources`, `update`, and `step` for the whole.
        peak_memory_bytes: As in `step_metrics`.
    """
    return {
        **_update_metrics(reports),
        **{f"time/{phase}": seconds for phase, seconds in times.items()},
        "throughput/images_per_second": images / times["step"],
        "memory/peak_bytes": float(peak_memory_bytes),
    }


def sampled_utilisation(
    work: StepWork, experience: Experience, times: Mapping[str, float]
) -> dict[str, float]:
    """Model FLOPs utilisation by phase, `perf/mfu/<phase>`: operations relative to the peak.

    Source: Chowdhery et al. 2022, PaLM (arXiv 2204.02311), appendix B; unlike there, recomputation
    for checkpointing counts, as in `glm-grpo plan`.

    Args:
        times: Seconds by phase.
    """
    sampled = experience.totals.numel()
    is_learned_from = experience.is_learned_from()[experience.trained_groups()]
    learned = is_learned_from.sum() if work.skips_zero_std else is_learned_from.numel()
    flops = {
        "rollout": sampled * work.rollout,
        "decode": sampled * work.decode,
        "update": int(learned) * work.update,
    }
    return _utilisation(flops, times, work.peak_flops)


def supervised_utilisation(
    work: StepWork, images: int, times: Mapping[str, float]
) -> dict[str, float]:
    """Like `sampled_utilisation`, for a supervised step."""
    return _utilisation({"update": images * work.update}, times, work.peak_flops)


def _utilisation(
    flops: Mapping[str, float], times: Mapping[str, float], peak_flops: float
) -> dict[str, float]:
    return {
        f"perf/mfu/{phase}": count / (times[phase] * peak_flops)
        for phase, count in flops.items()
        if count > 0
    }


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Mean total, and mean of every term over the held-out images that it scored.

    For terms in `EXACT`, also the share of right images, such as `eval/ocr_exact`. For a term that
    refused images, also `eval/<name>/refused_fraction`.
    """
    table = evaluation.scores
    metrics = {"eval/total": evaluation.totals.nanmean().item()}
    for name in table.names:
        metrics[f"eval/{name}"] = _mean(_scores(table, name))
    for name, exact in EXACT.items():
        if name in table.names:
            metrics[f"eval/{exact.name}"] = _mean(_right_images(table, name, exact))
    for refused in find_refusals(evaluation.prompts, table):
        if refused.count > 0:
            metrics[f"eval/{refused.term}/refused_fraction"] = refused.fraction
    return metrics


def _reward_metrics(experience: Experience, combine: Mode) -> dict[str, float]:
    table, totals = experience.scores, experience.totals
    if combine == "normalize_then_sum":
        # Standardised within its group, every group's mean is 0: only raw scores show progress.
        totals = contributions(table, mode="weighted_sum").sum(dim=-1)
    audit = audit_table(table, mode=combine)
    kept = totals[~totals.isnan()]
    metrics = {"reward/mean": kept.mean().item(), "reward/std": kept.std(correction=0).item()}
    refusals = find_refusals(experience.prompts.prompts, table)
    for row, (term, refused) in enumerate(zip(audit.terms, refusals, strict=True)):
        metrics[f"reward/{term.name}/mean"] = term.mean
        metrics[f"reward/{term.name}/std"] = term.std
        metrics[f"reward/{term.name}/std_within"] = term.std_within
        metrics[f"reward/{term.name}/advantage_share"] = term.advantage_share
        metrics[f"reward/{term.name}/zero_std_fraction"] = term.zero_std_fraction
        metrics[f"reward/{term.name}/refused_fraction"] = refused.fraction
        for column in range(row):
            other = audit.terms[column].name
            metrics[f"correlation/{other}/{term.name}"] = audit.correlations[row, column].item()
    metrics["advantage/zero_std_fraction"] = experience.is_zero_std().float().mean().item()
    if experience.place_credit is not None:
        metrics["credit/placed"] = placed_share(table, mode=combine)
        metrics["credit/token_rms"] = experience.advantages.square().mean().sqrt().item()
    if experience.trained is not None:
        metrics["advantage/discarded_groups"] = float(experience.is_discarded().sum())
    return metrics


def _update_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    # One value that is not finite would hide the other updates of the step.
    done = [report for report in reports if not report.is_skipped]
    first = reports[0].metrics
    # A minibatch without such a metric gives NaN, for instance one without target images.
    found = {
        name: [value for report in done if not math.isnan(value := report.metrics[name])]
        for name in first
    }
    metrics = {name: _mean(values) for name, values in found.items()}
    return metrics | {
        "optim/learning_rate": reports[-1].metrics["optim/learning_rate"],
        "optim/skipped_updates": float(len(reports) - len(done)),
    }


def _scores(table: RewardTable, name: str) -> list[float]:
    """Raw scores of a term for all images that it scored."""
    index = table.names.index(name)
    scores = table.raw[table.is_applicable[:, index], :, index]
    scored: list[float] = scores[~scores.isnan()].tolist()
    return scored


def _right_images(table: RewardTable, name: str, exact: Exact) -> list[float]:
    """1 for right images, 0 for wrong ones, of those for which it is known."""
    index = table.names.index(name)
    scores = table.raw[:, :, index].masked_fill(~table.is_applicable[:, index, None], math.nan)
    notes = table.notes.get(name, ((),) * len(scores))
    values = [
        exact.value_of(score, note)
        for group, found in zip(scores.tolist(), notes, strict=True)
        for score, note in zip(group, found or (None,) * len(group), strict=True)
    ]
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
