"""Turn the samples of a probe into figures of each term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float32
from torch import Tensor

from glm_grpo.config import Config
from glm_grpo.studio.probe.gradient import ProbedGradient
from glm_grpo.studio.probe.probe import FullDecode, ProbeSamples
from glm_grpo.studio.probe.verdict import ProbedRun, Verdict, judge_gradient, judge_scores
from glm_grpo.training.monitors.recheck import compare_ranks
from rewards.audit import RewardAudit, TermAudit, audit_table, audit_total, noise_fractions
from rewards.types import RewardTable
from rewards.weighting import Mode, combine, in_group_stds


@dataclass(frozen=True)
class ProbedTerm:
    """Figures of one term, in units of its raw score.

    Attributes:
        equal_weight: See `equal_weights`.
        target: Mean score of the target images themselves; NaN without targets.
        reconstruction: Mean score of the decoded tokens of the target images, what a perfect
            policy would get; NaN without targets.
        room: Mean, over the prompts with a target, of that score less the mean of the prompt's
            samples; NaN without targets.
        copied_source: Mean score of the unchanged first source image; NaN without sources.
        noise_fraction: See `rewards.audit.noise_fractions`.
        verdict: Whether it can move the model; None if it applies to no prompt, or has a negative
            weight.
    """

    audit: TermAudit
    weight: float
    equal_weight: float
    target: float
    reconstruction: float
    room: float
    copied_source: float
    noise_fraction: float
    verdict: Verdict | None


@dataclass(frozen=True)
class ProbedDecode:
    """How rollouts decoded with fewer denoising steps compare with those decoded in full.

    Attributes:
        steps: Denoising steps of rollouts.
        full_steps: Denoising steps of evaluations; more.
        rank_correlations: For each term, in the order of the report: Spearman's between the two
            decodes of the same tokens, inside groups, averaged over them; NaN where no group has
            an order.
        total_rank_correlation: Likewise of the total.
        images_per_second: Drawn, not scored, with the steps of rollouts.
        full_images_per_second: With all steps.
    """

    steps: int
    full_steps: int
    rank_correlations: tuple[float, ...]
    total_rank_correlation: float
    images_per_second: float
    full_images_per_second: float


@dataclass(frozen=True)
class ProbeReport:
    """All figures of a probe.

    Attributes:
        terms: In the order of the table; not all weights are 0.
        audit: Audit of the terms.
        total: Audit of the total.
        mean_total: Mean over all samples; NaN where totals are relative to a group.
        copy_total: Mean total of the unchanged first source images; NaN without sources, and
            where totals are relative to a group.
        total_noise_fraction: See `rewards.audit.noise_fractions`.
        verdict: Whether the whole reward can move the model.
        decode: None where rollouts are decoded in full.
        gradient: None where it was not measured.
    """

    terms: tuple[ProbedTerm, ...]
    audit: RewardAudit
    total: TermAudit
    prompts: int
    group_size: int
    mean_total: float
    copy_total: float
    total_noise_fraction: float
    verdict: Verdict | None
    decode: ProbedDecode | None
    gradient: ProbedGradient | None

    def names(self) -> tuple[str, ...]:
        """Names of the terms."""
        return tuple(term.audit.name for term in self.terms)


def report_probe(
    samples: ProbeSamples, config: Config, gradient: ProbedGradient | None = None
) -> ProbeReport:
    """Turn samples into figures.

    Args:
        config: Combination of terms and sizes of the run are used.
        gradient: Gradients of the batches, if they were measured.
    """
    table, mode = samples.scores, config.reward.combine
    audit, total = audit_table(table, mode=mode), audit_total(table, mode=mode)
    run = ProbedRun(
        prompts=len(samples.prompts),
        noises=samples.redrawn.shape[1],
        group_size=samples.totals.shape[1],
        prompts_per_step=config.rollout.prompts_per_step,
        steps=config.train.steps,
    )
    noise = noise_fractions(samples.redrawn, table).tolist()
    # A score that lowers the total has its best images at the other end.
    verdicts = [
        None if weight < 0 else judge_scores(term, fraction, run)
        for term, fraction, weight in zip(audit.terms, noise, table.weights.tolist(), strict=True)
    ]
    total_noise = _total_noise_fraction(samples, mode=mode)
    verdict = judge_scores(total, total_noise, run)
    if gradient is not None:
        verdict = judge_gradient(total, gradient.agreement, run)
    terms = zip(
        audit.terms,
        table.weights.tolist(),
        equal_weights(audit.terms, table.weights, mode=mode).tolist(),
        samples.target.nanmean(dim=0).tolist(),
        samples.reconstruction.nanmean(dim=0).tolist(),
        (samples.reconstruction - table.raw.nanmean(dim=1)).nanmean(dim=0).tolist(),
        samples.copies.nanmean(dim=0).tolist(),
        noise,
        verdicts,
        strict=True,
    )
    copy_total = math.nan
    if mode == "weighted_sum" and not samples.copies.isnan().all():
        copies = replace(table, raw=samples.copies[:, None])
        copy_total = combine(copies, mode=mode).nanmean().item()
    return ProbeReport(
        terms=tuple(ProbedTerm(*figures) for figures in terms),
        audit=audit,
        total=total,
        prompts=run.prompts,
        group_size=run.group_size,
        mean_total=samples.totals.nanmean().item() if mode == "weighted_sum" else math.nan,
        copy_total=copy_total,
        decode=None if samples.full is None else report_decode(samples.full, table, mode=mode),
        total_noise_fraction=total_noise,
        verdict=verdict,
        gradient=gradient,
    )


def _total_noise_fraction(samples: ProbeSamples, *, mode: Mode) -> float:
    """Of the total; a term standardised in each group has its noise in the same stds."""
    redrawn = samples.redrawn
    if mode == "normalize_then_sum":
        redrawn = in_group_stds(redrawn, samples.scores)
    redrawn = combine(replace(samples.scores, raw=redrawn), mode="weighted_sum")
    totals = RewardTable(
        names=("total",),
        raw=samples.totals[..., None],
        is_applicable=torch.ones(len(samples.totals), 1, dtype=torch.bool),
        weights=torch.ones(1),
        std_floors=torch.ones(1),
    )
    return noise_fractions(redrawn[..., None], totals).item()


def report_decode(full: FullDecode, cheap: RewardTable, *, mode: Mode) -> ProbedDecode:
    """Turn two decodes of the same samples into figures.

    Args:
        cheap: Raw scores of the samples as rollouts decode them.
    """
    agreement = compare_ranks(cheap, full.scores, mode=mode)
    return ProbedDecode(
        steps=full.cheap_steps,
        full_steps=full.steps,
        rank_correlations=tuple(agreement.terms.values()),
        total_rank_correlation=agreement.total,
        images_per_second=full.timed_images / full.cheap_seconds,
        full_images_per_second=full.timed_images / full.seconds,
    )


def equal_weights(
    terms: Sequence[TermAudit], weights: Float32[Tensor, " R"], *, mode: Mode
) -> Float32[Tensor, " R"]:
    """Weights at which all terms have the same spread inside groups in the total.

    Each is proportional to 1 / `std_within` and has the sign of the term's weight; together they
    are as large as `weights`.

    Args:
        terms: Audit of each term.
        weights: Weights of the config, for the same terms.

    Returns:
        NaN for a term of weight 0 or without spread, and for all under `normalize_then_sum`, where
        equal weights have the same influence.
    """
    if mode == "normalize_then_sum":
        return torch.full_like(weights, torch.nan)
    # Rounding errors of equal scores are no spread.
    spreads = [term.std_within if term.zero_std_fraction < 1 else math.nan for term in terms]
    inverses = (weights.sign() / weights.new_tensor(spreads)).masked_fill(weights == 0, torch.nan)
    return inverses * (weights.abs().sum() / inverses.abs().nansum())
