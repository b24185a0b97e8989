"""Judge from the samples of a probe whether a reward can move the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from glm_grpo.grpo.signal_to_noise import Agreement
from rewards.audit import TermAudit
from rewards.weighting import ZERO_STD_TOLERANCE

Answer = Literal["can move it", "slowly", "cannot"]

_LEAST_UPSIDE = 1 / 3
"""Of a verdict that nine of ten images pass, the best of a group is a third of a spread above the
mean; of normal scores, the best of eight is 1.4 spreads above it."""
_MOST_WASTED = 0.5
"""Fraction of zero-std groups above which more images are wasted than used."""
_MOST_NOISE = 0.5
"""Fraction of the spread above which more of it is chance than is the images'."""
_LEVEL = 0.05
"""Of the test whether batches agree."""


@dataclass(frozen=True)
class ProbedRun:
    """Sizes of the probe, and of the run that it is for.

    Attributes:
        prompts: Number of probed prompts.
        noises: How often the same tokens were decoded and scored again, >= 2.
        group_size: Images per prompt.
        prompts_per_step: Prompts of a step of the run.
        steps: Steps of the run.
    """

    prompts: int
    noises: int
    group_size: int
    prompts_per_step: int
    steps: int


@dataclass(frozen=True)
class Verdict:
    """Whether a reward can move the model.

    Attributes:
        reason: In one or two words; empty if it can.
        ground: The figures that say so, in words.
        remedy: What to change; may be empty.
    """

    answer: Answer
    reason: str
    ground: str
    remedy: str = ""

    def short(self) -> str:
        """Answer and reason."""
        return f"{self.answer}: {self.reason}" if self.reason else self.answer


def judge_scores(audit: TermAudit, noise_fraction: float, run: ProbedRun) -> Verdict | None:
    """Judge by scores alone, which show whether images of a prompt differ, but not why.

    Args:
        noise_fraction: See `rewards.audit.noise_fractions`; NaN if unknown.

    Returns:
        None for a term that applies to no prompt.
    """
    if math.isnan(audit.mean):
        return None
    return (
        _judge_range(audit)
        or _judge_noise(noise_fraction, run)
        or _judge_groups(audit, run)
        or Verdict(
            "can move it",
            "",
            f"the images of a prompt differ (std {audit.std_within:.3g}), the best of "
            f"{run.group_size} is {_upside(audit):.1f} std above the mean, and "
            f"{audit.zero_std_fraction:.0%} of groups are zero-std",
        )
    )


def judge_gradient(audit: TermAudit, agreement: Agreement, run: ProbedRun) -> Verdict:
    """Judge by the gradients of batches, which count whatever makes the reward hard to learn.

    Scores decide only where the gradient cannot: a reward that is constant or saturated.
    """
    if (verdict := _judge_range(audit)) is not None:
        return verdict
    measured = f"SNR {agreement.ratio:.3f} [{agreement.low:.3f}, {agreement.high:.3f}]"
    # Not `>`: NaN, of gradients that are all 0, is no agreement either.
    if not agreement.chance <= _LEVEL:
        return Verdict(
            "cannot",
            "noise",
            f"the gradients of batches agree no better than by chance ({measured}, p = "
            f"{agreement.chance:.2f}); if there is a signal, it is below {agreement.high:.3f}",
            "measure more batches (--prompts) to see a smaller one, or use finer scores, larger "
            "groups or a scorer with less noise",
        )
    needed = math.ceil(1 / agreement.ratio)
    ground = (
        f"the gradients of batches agree ({measured}, p = {agreement.chance:.3f}); their signal "
        f"exceeds their noise after {needed} of {run.steps} steps"
    )
    if needed <= run.steps:
        return Verdict("can move it", "", ground, _remedy_for_groups(audit))
    remedy = _remedy_for_groups(audit) or (
        "train for more steps, use more prompts per step or larger groups, or less noisy scores"
    )
    return Verdict("slowly", "weak gradient", ground, remedy)


def _judge_range(audit: TermAudit) -> Verdict | None:
    """A verdict if there is nothing to compare, or nothing to gain."""
    if audit.zero_std_fraction == 1:
        if audit.std <= ZERO_STD_TOLERANCE * abs(audit.mean):
            return Verdict(
                "cannot",
                "constant",
                f"every image scores {audit.mean:.3g}",
                "check the scorer and what it needs of the prompts, or leave the term out",
            )
        return Verdict(
            "cannot",
            "zero-std groups",
            f"the images of a prompt all score the same; only prompts differ (std {audit.std:.3g})",
            "score what differs between images of one prompt, or use finer scores",
        )
    if _upside(audit) < _LEAST_UPSIDE:
        return Verdict(
            "cannot",
            "saturated",
            f"the mean is {audit.mean:.3g}, and the best image of a group scores only "
            f"{audit.headroom:.3g} more, {_upside(audit):.2f} std",
            "use harder prompts, or a term that still separates good images",
        )
    return None


def _upside(audit: TermAudit) -> float:
    """How far the best of a group is above the mean, in std inside groups.

    Groups whose images all score the same, but less than the best, say nothing about a ceiling.
    """
    others = 1 - (audit.zero_std_fraction - audit.all_best)
    return audit.headroom / audit.std_within / math.sqrt(others)


def _judge_noise(fraction: float, run: ProbedRun) -> Verdict | None:
    if not fraction >= _MOST_NOISE:
        return None
    ground = (
        f"the same tokens, decoded and scored again, vary by {fraction:.2f} of the variance "
        "between the images of a prompt"
    )
    remedy = "use a scorer with less noise, or larger groups; --gradient shows what is left"
    # Of a quotient of two variances that are equal, with the degrees of freedom of each.
    error = math.sqrt(
        2 / run.prompts / (run.noises - 1) + 2 / run.prompts / max(run.group_size - 1, 1)
    )
    if fraction >= 1 - 2 * error:
        return Verdict("cannot", "noise", ground, remedy)
    return Verdict("slowly", "noise", ground, remedy)


def _judge_groups(audit: TermAudit, run: ProbedRun) -> Verdict | None:
    if audit.zero_std_fraction <= _MOST_WASTED:
        return None
    taught = (1 - audit.zero_std_fraction) * run.prompts_per_step
    answer: Answer = "slowly" if taught >= 1 else "cannot"
    ground = (
        f"{taught:.1f} of {run.prompts_per_step} groups in a step have images that score "
        f"differently, with {audit.distinct:.1f} distinct scores in a group on average"
    )
    return Verdict(answer, "zero-std groups", ground, _remedy_for_groups(audit))


def _remedy_for_groups(audit: TermAudit) -> str:
    """What to do about zero-std groups; empty if they are few."""
    if audit.zero_std_fraction <= _MOST_WASTED:
        return ""
    prompts = "easier" if audit.all_worst > audit.all_best else "harder"
    if audit.all_worst == audit.all_best:
        # Such as totals that are relative to their group, or of several terms.
        prompts = "other"
    return (
        f"{audit.zero_std_fraction:.0%} of groups teach nothing ({audit.all_worst:.0%} have only "
        f"the worst score, {audit.all_best:.0%} only the best): use {prompts} prompts, finer "
        "scores (`score: dense`) or larger groups"
    )
