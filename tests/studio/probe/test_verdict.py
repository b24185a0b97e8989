"""Verdicts on made-up scores, whose answer is known."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm_grpo.grpo.signal_to_noise import Agreement, measure_agreement
from glm_grpo.studio.probe.verdict import ProbedRun, Verdict, judge_gradient, judge_scores
from rewards.audit import TermAudit, audit_table
from rewards.types import RewardTable

RUN = ProbedRun(prompts=64, noises=4, group_size=8, prompts_per_step=8, steps=30)


def audit(scores: Tensor) -> TermAudit:
    table = RewardTable(
        names=("only",),
        raw=scores.float()[..., None],
        is_applicable=torch.ones(len(scores), 1, dtype=torch.bool),
        weights=torch.ones(1),
        std_floors=torch.ones(1),
    )
    return audit_table(table, mode="weighted_sum").terms[0]


def judged(scores: Tensor, noise_fraction: float = 0.0) -> Verdict:
    verdict = judge_scores(audit(scores), noise_fraction, RUN)
    assert verdict is not None
    return verdict


def random(*, seed: int = 0) -> Tensor:
    return torch.rand(RUN.prompts, RUN.group_size, generator=torch.Generator().manual_seed(seed))


def passed(probability: float | Tensor) -> Tensor:
    """A verdict that images pass with a probability, of one for each prompt."""
    return (random() < probability).float()


def between() -> Tensor:
    """Prompts differ, but the images of a prompt do not."""
    return random()[:, :1].expand(-1, RUN.group_size)


def two_kinds_of_prompts() -> Tensor:
    """Half of the prompts are always right, the others never, but for one in ten."""
    groups = torch.zeros(RUN.prompts, RUN.group_size)
    groups[::2] = 1.0
    groups[::10, ::2] = 0.5
    return groups


@pytest.mark.parametrize(
    ("scores", "answer", "reason"),
    [
        (lambda: torch.full((64, 8), 0.5), "cannot", "constant"),
        (lambda: torch.zeros(64, 8), "cannot", "constant"),
        (between, "cannot", "zero-std groups"),
        # Groups of eight with two scores: 9 in 10 are mixed, 1 in 3, 1 in 13.
        (lambda: passed(0.25), "can move it", ""),
        (lambda: passed(0.05), "slowly", "zero-std groups"),
        (lambda: passed(0.01), "cannot", "zero-std groups"),
        (lambda: passed(0.97), "cannot", "saturated"),
        # Most scores at a ceiling, the others anywhere below.
        (lambda: torch.where(random(seed=1) < 0.93, 1.0, random()), "cannot", "saturated"),
        # Without a ceiling, and with prompts whose scores differ much more than their images'.
        (random, "can move it", ""),
        (lambda: random() + 100 * between(), "can move it", ""),
        # Judges' grades.
        (lambda: (random() * 4).round() / 4, "can move it", ""),
        # Not a ceiling, though the best of a group is near the mean.
        (two_kinds_of_prompts, "cannot", "zero-std groups"),
    ],
)
def test_scores_are_judged_by_whether_images_of_a_prompt_differ(
    scores: Callable[[], Tensor], answer: str, reason: str
) -> None:
    verdict = judged(scores())
    assert (verdict.answer, verdict.reason) == (answer, reason), verdict.ground
    assert bool(verdict.remedy) == (answer != "can move it")


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_the_scale_of_a_score_does_not_matter(factor: float) -> None:
    for scores in (random(), passed(0.05), passed(0.97), between()):
        assert judged(scores * factor).short() == judged(scores).short()


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.4, "can move it"),
        # The two variances are 0.13 standard errors apart with 64 prompts: 1 - 2 x 0.12 = 0.76.
        (0.7, "slowly: noise"),
        (0.8, "cannot: noise"),
        (1.3, "cannot: noise"),
        (float("nan"), "can move it"),
    ],
)
def test_noise_is_what_scoring_the_same_tokens_again_changes(
    fraction: float, expected: str
) -> None:
    assert judged(random(), fraction).short() == expected


def test_remedy_depends_on_whether_groups_are_all_worst_or_all_best() -> None:
    assert "easier prompts" in judged(passed(0.05)).remedy
    half_known = passed(torch.where(torch.arange(64)[:, None] < 48, 1.0, 0.5))
    assert "harder prompts" in judged(half_known).remedy
    # Of totals that are relative to their group, zero-std groups are neither.
    centred = passed(0.05)
    centred -= centred.mean(dim=1, keepdim=True)
    assert "other prompts" in judged(centred).remedy


def test_a_term_that_applies_to_no_prompt_is_not_judged() -> None:
    assert judge_scores(audit(torch.full((2, 4), torch.nan)), 0.0, RUN) is None


def gradients(signal: float) -> Agreement:
    """Of eight batches in 200 dimensions, whose mean squared is `signal` times their variance."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(9, 200, dtype=torch.float64, generator=generator)
    found = drawn[:8] + drawn[8] / drawn[8].norm() * (200 * signal) ** 0.5
    return measure_agreement(found @ found.T)


@pytest.mark.parametrize(
    ("signal", "expected"),
    [(0.0, "cannot: noise"), (0.1, "slowly: weak gradient"), (0.3, "can move it")],
)
def test_the_gradient_is_judged_by_what_batches_have_in_common(
    signal: float, expected: str
) -> None:
    run = ProbedRun(prompts=64, noises=4, group_size=8, prompts_per_step=8, steps=5)
    verdict = judge_gradient(audit(random()), gradients(signal), run)
    assert verdict.short() == expected, verdict.ground


def test_the_gradient_decides_unless_there_is_nothing_to_gain() -> None:
    clear, none = gradients(0.3), gradients(0.0)
    verdict = judge_gradient(audit(passed(0.05)), clear, RUN)
    # It counts how many groups teach, which is told all the same.
    assert verdict.answer == "can move it"
    assert re.match(r"6\d% of groups teach nothing \(6\d% .* 0% only the best\)", verdict.remedy)
    assert judge_gradient(audit(passed(0.97)), clear, RUN).reason == "saturated"
    assert judge_gradient(audit(torch.ones(64, 8)), none, RUN).reason == "constant"
    assert judge_gradient(audit(random()), none, RUN).reason == "noise"
