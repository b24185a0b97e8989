"""Findings of a probe: figures of each term, and those that stand out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from glm_grpo.gallery.report import NO_VALUE
from glm_grpo.report.probe.credit import ProbedCredit
from glm_grpo.run.summaries import FEWEST_PROMPTS
from rewards.audit.audit import Conflict, RewardAudit, TermAudit

FAINT = 0.1
"""Size of a share of the advantage, relative to the share of the weights, below which a term is
said to have no say."""
DOMINANT = 0.8
"""Share of the advantage above which one term is said to drive the training."""
MOSTLY_FLAT = 0.5
"""Fraction of flat groups above which a term is said to teach little."""
MOSTLY_TIED = 0.5
"""Part of the images that score like the best of their group, over the groups that are not flat,
above which a term is said to be at its ceiling."""
NOISY_DECODER = 0.5
"""Decoder's part of the variance inside groups above which a term is said to reward its chance."""
SAME = 0.95
"""Correlation of two weighted terms inside groups above which they are said to ask for the same."""
LITTLE_HEADROOM = 0.05
"""Headroom, relative to the room to the targets' own tokens (without it, to the std), below which
there is said to be nothing to reinforce."""
NOTHING_TO_GAIN = 0.01
"""Headroom, relative to the size of the mean score, below which a term with almost no influence is
said to have nothing to gain: more weight would teach nothing."""
LITTLE_ROOM = 0.1
"""Room to the targets' own tokens, in std of the term, below which the samples are said to be
there already."""
LOST_TEXT = 0.1
"""A text term that scores the targets' own tokens lower than the targets, by more than this
fraction, is reported as losing text in the tokens."""
_ROUNDING = 1e-12
"""Below it a figure is the rounding of a mean."""


@dataclass(frozen=True)
class ProbedTerm:
    """What the probe says about one term, in units of its raw score.

    Attributes:
        audit: Figures of the samples.
        target: Mean score of the target images themselves; NaN without targets.
        reconstruction: Mean score of the decoded tokens of the target images, what a perfect
            policy would get; NaN without targets.
        room: Mean, over the prompts with a target, of that score less the mean of the prompt's
            samples; NaN without targets.
        decoder_fraction: See `rewards.audit.audit.decoder_fractions`.
        equal_weight: See `equal_weights`.
        is_unscored: Only evaluations score it.
        is_of_text: It reads the text of a prompt.
    """

    audit: TermAudit
    weight: float
    target: float
    reconstruction: float
    room: float
    decoder_fraction: float
    equal_weight: float
    is_unscored: bool = False
    is_of_text: bool = False


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
        min_rank_correlation: That of the total below which a run falls back to the full decode.
        images_per_second: Drawn, not scored, with the steps of rollouts.
        full_images_per_second: With all steps.
    """

    steps: int
    full_steps: int
    rank_correlations: tuple[float, ...]
    total_rank_correlation: float
    min_rank_correlation: float
    images_per_second: float
    full_images_per_second: float


@dataclass(frozen=True)
class ProbeReport:
    """What the probe found.

    Attributes:
        terms: In the order of the table; not all weights are 0.
        audit: Audit of the whole reward.
        conflicts: Pairs of terms that pull against each other.
        prompts: N.
        group_size: G.
        decode: None where rollouts are decoded in full.
        mean_total: Mean over all samples.
        copy_total: Mean total of the source pictures as they are; NaN without sources, and where
            totals are relative to a group.
        credit: None where gradients were not compared.
    """

    terms: tuple[ProbedTerm, ...]
    audit: RewardAudit
    conflicts: tuple[Conflict, ...]
    prompts: int
    group_size: int
    decode: ProbedDecode | None
    mean_total: float = math.nan
    copy_total: float = math.nan
    credit: ProbedCredit | None = None

    @property
    def has_few_prompts(self) -> bool:
        """Whether the prompts are too few for a verdict, as they are for an interval."""
        return self.prompts < FEWEST_PROMPTS

    def names(self) -> tuple[str, ...]:
        """Names of the terms."""
        return tuple(term.audit.name for term in self.terms)

    def weight_shares(self) -> tuple[float, ...]:
        """Size of each weight relative to that of all; they add up to 1."""
        total = math.fsum(abs(term.weight) for term in self.terms)
        return tuple(abs(term.weight) / total for term in self.terms)


@dataclass(frozen=True)
class Finding:
    """Something to know before the run starts.

    Attributes:
        term: That it is about; empty for the reward as a whole.
        what: Was found.
        remedy: What to do about it.
    """

    term: str
    what: str
    remedy: str


def list_findings(report: ProbeReport) -> tuple[Finding, ...]:
    """What stands out: figures beyond the thresholds of this module, in the order of the terms.

    A term gets one finding, the one that decides what to do: a term that is flat, noisy or at its
    ceiling is not also reported for its share.

    Terms of weight 0 are only watched: of them it is said at most that they apply to no prompt.
    With too few prompts that holds for all terms, and nothing is said about the whole reward.
    The credit is judged by its own interval, which is between batches.
    """
    findings = [] if report.credit is None else [_examine_credit(report.credit)]
    examined = [
        finding
        for term, weight_share in zip(report.terms, report.weight_shares(), strict=True)
        for finding in itertools.islice(_examine(term, weight_share, report), 1)
    ]
    if report.has_few_prompts:
        what = (
            f"too few prompts for findings: {report.prompts}, so shares and correlations may be "
            "due to chance"
        )
        remedy = f"probe at least {FEWEST_PROMPTS}: --prompts {FEWEST_PROMPTS}"
        return (Finding("", what, remedy), *examined, *findings)
    if all(term.audit.advantage_share == 0 for term in report.terms):
        what = (
            "all totals of every group are equal: no image is better, so nothing would be learned"
        )
        remedy = "weigh a term that distinguishes the images, or raise rollout.temperature"
        findings.append(Finding("", what, remedy))
    # NaN compares as False.
    if report.copy_total > report.mean_total:
        what = (
            f"a copy of the source scores {render(report.copy_total)}, the samples "
            f"{render(report.mean_total)} on average: changing nothing pays"
        )
        remedy = (
            "lower the weights of terms with against: source, or raise those of terms that the "
            "requested change improves; during training, watch canary/source_copies"
        )
        findings.append(Finding("", what, remedy))
    findings += examined
    if report.decode is not None:
        findings += _examine_decode(report.decode)
    return (*findings, *_examine_pairs(report))


def _examine_credit(credit: ProbedCredit) -> Finding:
    """Whether credit by place, with the config's `later`, gives a clearer gradient."""
    found = credit.by_place[credit.later]
    more = f"compare more batches: --prompts {2 * credit.batches * credit.prompts}"
    if math.isnan(found.low):
        what = (
            "whether credit by place gives a clearer gradient than credit by image is not "
            f"measurable: the signal is lost in the noise of {credit.batches} batches"
        )
        return Finding("", what, f"keep advantage.credit=image, or {more}")
    times = (
        f"SNR of the gradient by place {found.relative:.1f} times ({found.low:.1f} to "
        f"{found.high:.1f}) that by image"
    )
    if found.low > 1:
        what = (
            f"{times}: the same gradient quality from about {1 / found.relative:.0%} of the images "
            f"(cosine of the mean gradients {found.cosine:.2f})"
        )
        remedy = "try ten steps with advantage.credit=place and ten with image, then compare them"
        return Finding("", what, remedy)
    if found.high < 1:
        return Finding("", f"{times}: a noisier gradient", "keep advantage.credit=image")
    what = f"{times}: no measurable difference"
    return Finding("", what, f"keep advantage.credit=image, or {more}")


def _examine_decode(decode: ProbedDecode) -> Iterator[Finding]:
    if decode.total_rank_correlation < decode.min_rank_correlation:
        what = (
            f"rollouts decoded in {decode.steps} of {decode.full_steps} steps are not ranked like "
            f"those decoded in full: correlation {decode.total_rank_correlation:.3f} inside "
            f"groups, below decode.min_rank_correlation = {decode.min_rank_correlation:g}, so a "
            "run would fall back to the full decode"
        )
        yield Finding("", what, "raise decode.rollout_steps, or leave it out")


def _examine_pairs(report: ProbeReport) -> Iterator[Finding]:
    for (row, first), (column, second) in itertools.combinations(enumerate(report.terms), 2):
        correlation = report.audit.correlations[row, column].item()
        if correlation > SAME and first.weight * second.weight > 0:
            yield Finding(
                f"{first.audit.name}, {second.audit.name}",
                f"measure the same thing: their scores correlate by {correlation:.2f} inside "
                "groups",
                "keep one, with their combined weight: it trains the same and costs less",
            )


def _examine(term: ProbedTerm, weight_share: float, report: ProbeReport) -> Iterator[Finding]:
    audit, name = term.audit, term.audit.name
    if term.is_unscored:
        what = "is scored only in evaluations (when: evaluation), so not by the probe"
        yield Finding(name, what, f"probe with reward.terms.{name}.when=always to see its figures")
        return
    if math.isnan(audit.mean):
        what = f"applies to none of the {report.prompts} prompts"
        remedy = "give the prompts what it compares with (a target, a quoted text), or leave it out"
        yield Finding(name, what, remedy)
        return
    if term.weight == 0 or report.has_few_prompts:
        return
    # NaN compares as False.
    if term.is_of_text and term.target - term.reconstruction > LOST_TEXT * term.target:
        what = (
            f"text lost in the tokens: the targets score {render(term.target)}, their own tokens "
            f"{render(term.reconstruction)}, the samples {render(audit.mean)}"
        )
        remedy = (
            "use larger images, or targets with larger text; do not learn from these targets "
            "(train.method=sft, anchor.weight)"
        )
        yield Finding(name, what, remedy)
    if audit.flat_fraction > MOSTLY_FLAT:
        what = (
            f"scores all images alike in {audit.flat_fraction:.0%} of the groups, which learn "
            "nothing from it; its mean shows whether it is at its ceiling or at its floor"
        )
        remedy = "use prompts that the model sometimes gets right, or raise rollout.group_size"
        yield Finding(name, what, remedy)
    if term.decoder_fraction > NOISY_DECODER:
        what = (
            "depends on the decoder's noise: other noises on the same tokens give "
            f"{term.decoder_fraction:.2f} of the variance inside groups"
        )
        remedy = (
            "lower its weight, or average the noise out over more prompts: rollout.prompts_per_step"
        )
        yield Finding(name, what, remedy)
    # A term that is to be pushed down has neither headroom nor ceiling upwards.
    if term.weight > 0 and not _has_nothing_to_gain(term, weight_share):
        yield from _examine_ceiling(term)
        yield from _examine_headroom(term, report.group_size)
    if audit.flat_fraction < 1:
        yield from _examine_share(term, weight_share, report)


def _examine_share(term: ProbedTerm, weight_share: float, report: ProbeReport) -> Iterator[Finding]:
    name, share = term.audit.name, term.audit.advantage_share
    said = f"{share:.3f} of the advantage for {weight_share:.3f} of the weights"
    remedy = (
        "set reward.combine=normalize_then_sum, under which weights are on one scale, or weights "
        "near the equal ones"
    )
    if share <= -FAINT * weight_share:
        yield Finding(name, f"is outvoted, {said}: training would make it worse", remedy)
    elif _has_nothing_to_gain(term, weight_share):
        what = (
            f"has almost no influence and nothing to gain: {said}; the best of {report.group_size} "
            f"is {render(term.audit.headroom)} above the mean of {render(term.audit.mean)}"
        )
        remedy = f"leave it out, or only watch it: weight 0 and reward.watch=[{name}]"
        yield Finding(name, what, remedy)
    elif share < FAINT * weight_share:
        yield Finding(name, f"has almost no influence: {said}", remedy)
    has_rivals = any(
        other is not term and other.weight != 0 and not _has_nothing_to_gain(other, other_share)
        for other, other_share in zip(report.terms, report.weight_shares(), strict=True)
    )
    if share > DOMINANT and has_rivals:
        yield Finding(name, f"drives the training almost alone: {said}", remedy)


def _has_nothing_to_gain(term: ProbedTerm, weight_share: float) -> bool:
    """Whether a term that is to rise has almost no influence because it cannot rise."""
    audit = term.audit
    is_faint = abs(audit.advantage_share) < FAINT * weight_share
    # A term at its floor has a small mean, which its headroom is large beside, or is flat.
    is_at_its_top = audit.headroom < NOTHING_TO_GAIN * abs(audit.mean) and audit.flat_fraction < 1
    return term.weight > 0 and is_faint and is_at_its_top


def _examine_headroom(term: ProbedTerm, group_size: int) -> Iterator[Finding]:
    audit = term.audit
    # NaN compares as False.
    scale, named = (
        (term.room, "the gap to the targets' own tokens")
        if term.room > 0
        else (audit.std, "its std over all images")
    )
    if audit.headroom < LITTLE_HEADROOM * scale:
        what = (
            f"has no headroom: the best of {group_size} is {render(audit.headroom)} above the "
            f"mean, {audit.headroom / scale:.1%} of {named}"
        )
        remedy = (
            "raise rollout.group_size or rollout.temperature, or start from a model that sometimes "
            "does what the term asks for"
        )
        yield Finding(audit.name, what, remedy)


def _examine_ceiling(term: ProbedTerm) -> Iterator[Finding]:
    audit = term.audit
    if term.room <= LITTLE_ROOM * audit.std:
        what = (
            f"has nothing left to gain: the samples score {render(audit.mean)}, the targets' own "
            f"tokens {render(term.reconstruction)}; more of it brings them no closer to the targets"
        )
        remedy = f"lower its weight, or only watch it: weight 0 and reward.watch=[{audit.name}]"
        yield Finding(audit.name, what, remedy)
    # A flat group is tied whole and counts as 1; what is left is the mean over the others.
    varied = 1 - audit.flat_fraction
    tied = audit.saturation - audit.flat_fraction
    if tied > MOSTLY_TIED * varied:
        what = (
            "is at its ceiling: in the groups that are not flat, "
            f"{tied / varied:.0%} of the other images score like the best one"
        )
        remedy = "use harder prompts, or give its weight to terms that still distinguish the images"
        yield Finding(audit.name, what, remedy)


def render(value: float) -> str:
    """Three digits that count, as terms are of order 0.001 or of order 10; a dash for NaN."""
    exact = 0.0 if abs(value) < _ROUNDING else value
    return NO_VALUE if math.isnan(value) else f"{exact:#.3g}".removesuffix(".")
