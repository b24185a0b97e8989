"""What the probe finds wrong with a reward, and the remedy it names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glm_grpo.report.probe.findings import list_findings
from tests.report.probe.reports import (
    NAN,
    UNDEFINED,
    make_credit,
    make_decode,
    make_report,
    make_term,
    with_other,
)


@pytest.mark.parametrize(
    ("beyond", "at", "what", "remedy"),
    [
        (
            {"flat_fraction": 0.75, "saturation": 0.75},
            {"flat_fraction": 0.5, "saturation": 0.5},
            "scores all images alike in 75% of the groups",
            "use prompts that the model sometimes gets right",
        ),
        (
            # A tenth of half the weights.
            {"advantage_share": 0.0499},
            {"advantage_share": 0.05},
            "has almost no influence: 0.050 of the advantage for 0.500 of the weights",
            "set reward.combine=normalize_then_sum",
        ),
        (
            {"advantage_share": -0.25},
            {},
            "is outvoted, -0.250 of the advantage for 0.500 of the weights",
            "set reward.combine=normalize_then_sum",
        ),
        (
            {"advantage_share": 0.81},
            {"advantage_share": 0.8},
            "drives the training almost alone: 0.810 of the advantage",
            "set reward.combine=normalize_then_sum",
        ),
        (
            {"decoder_fraction": 0.75},
            {"decoder_fraction": 0.5},
            "other noises on the same tokens give 0.75 of the variance",
            "rollout.prompts_per_step",
        ),
        (
            # A twentieth of the room of 0.5 is 0.025.
            {"headroom": 0.02},
            {"headroom": 0.025},
            "the best of 8 is 0.0200 above the mean, 4.0% of the gap to the targets' own tokens",
            "raise rollout.group_size or rollout.temperature",
        ),
        (
            # Without targets a twentieth of the std of 0.25: 0.0125.
            {"headroom": 0.01, "reconstruction": NAN, "room": NAN},
            {"headroom": 0.0125, "reconstruction": NAN, "room": NAN},
            "the best of 8 is 0.0100 above the mean, 4.0% of its std over all images",
            "start from a model that sometimes does what the term asks for",
        ),
        (
            # A quarter of the groups are flat; of the others 60 % and 50 % of the images are tied.
            {"flat_fraction": 0.25, "saturation": 0.7},
            {"flat_fraction": 0.25, "saturation": 0.625},
            "is at its ceiling: in the groups that are not flat, 60% of the other images",
            "use harder prompts",
        ),
        (
            # A tenth of the std of 0.25 is 0.025.
            {"room": 0.025, "reconstruction": 0.525},
            {"room": 0.03125, "reconstruction": 0.53125},
            "has nothing left to gain: the samples score 0.500, the targets' own tokens 0.525",
            "weight 0 and reward.watch=[lpips]",
        ),
        (
            # The samples are read better than the targets' own tokens, which is no ceiling.
            {"is_of_text": True, "mean": 0.61, "reconstruction": 0.06, "room": -0.55},
            {"is_of_text": True, "mean": 0.61, "reconstruction": 0.9, "room": 0.29},
            "text lost in the tokens: the targets score 1.00, their own tokens 0.0600, the samples",
            "use larger images",
        ),
        (
            {**UNDEFINED, "advantage_share": 0.0},
            {},
            "applies to none of the 24 prompts",
            "give the prompts what it compares with",
        ),
        (
            {**UNDEFINED, "weight": 0.0, "advantage_share": 0.0, "is_unscored": True},
            {},
            "is scored only in evaluations (when: evaluation), so not by the probe",
            "reward.terms.lpips.when=always",
        ),
    ],
)
def test_findings_say_what_is_beyond_a_threshold_and_what_to_do(
    beyond: dict[str, float], at: dict[str, float], what: str, remedy: str
) -> None:
    (finding,) = list_findings(with_other(**beyond))
    assert finding.term == "lpips"
    assert what in finding.what
    assert remedy in finding.remedy
    assert list_findings(with_other(**at)) == ()


def test_findings_say_that_nothing_would_be_learned() -> None:
    flat = {
        **{"advantage_share": 0.0, "flat_fraction": 1.0, "saturation": 1.0, "headroom": 0.0},
        **{"std_within": 0.0, "decoder_fraction": NAN},
    }
    report = make_report(make_term(**flat), make_term(**flat, name="ocr"))
    # Whatever its weight, a term that is flat everywhere has no share: that is not said besides.
    assert [(finding.term, finding.what[:20]) for finding in list_findings(report)] == [
        ("", "all totals of every "),
        ("lpips", "scores all images al"),
        ("ocr", "scores all images al"),
    ]


def test_findings_say_nothing_of_terms_that_are_only_watched() -> None:
    bad = {"flat_fraction": 0.75, "decoder_fraction": 2.0, "room": 0.0, "headroom": 0.0}
    assert list_findings(with_other(weight=0.0, advantage_share=0.0, **bad)) == ()
    (finding,) = list_findings(with_other(**UNDEFINED, weight=0.0, advantage_share=0.0))
    assert finding.what == "applies to none of the 24 prompts"


def test_findings_look_for_no_ceiling_of_a_term_that_is_to_be_pushed_down() -> None:
    limits = {"headroom": 0.0, "saturation": 1.0, "room": -1.0}
    (finding,) = list_findings(with_other(**limits))
    assert "has nothing left to gain" in finding.what
    assert list_findings(with_other(**limits, weight=-0.5)) == ()


def test_findings_name_terms_that_ask_for_the_same() -> None:
    alike = torch.tensor([[1.0, 0.97], [0.97, 1.0]], dtype=torch.float64)
    (finding,) = list_findings(make_report(make_term(), make_term(name="ocr"), correlations=alike))
    assert (finding.term, "0.97" in finding.what) == ("lpips, ocr", True)
    # One is pushed down, or only watched: they do not measure the same thing.
    for weight in (-0.5, 0.0):
        other = make_term(name="ocr", weight=weight, advantage_share=0.5 if weight else 0.0)
        assert list_findings(make_report(make_term(), other, correlations=alike)) == ()


def test_findings_leave_out_a_term_that_has_nothing_to_gain() -> None:
    top = {"mean": 0.994, "std": 0.004, "headroom": 0.005, "reconstruction": NAN, "room": NAN}
    top |= {"name": "aesthetic", "advantage_share": 0.002}
    ocr = make_term(name="ocr", advantage_share=0.998)
    # Nor is the other term said to drive the training alone: it is to.
    (finding,) = list_findings(make_report(make_term(**top), ocr))
    assert finding.what == (
        "has almost no influence and nothing to gain: 0.002 of the advantage for 0.500 of the "
        "weights; the best of 8 is 0.00500 above the mean of 0.994"
    )
    assert finding.remedy == (
        "leave it out, or only watch it: weight 0 and reward.watch=[aesthetic]"
    )
    # A hundredth of the mean above it there is something to gain.
    whats = [
        each.what[:12]
        for each in list_findings(make_report(make_term(**top | {"headroom": 0.01}), ocr))
    ]
    assert whats == ["has almost n", "drives the t"]


def test_findings_say_that_a_run_would_fall_back_to_the_full_decode() -> None:
    terms = (make_term(), make_term(name="ocr"))
    below = make_decode(total_rank_correlation=0.8)
    (finding,) = list_findings(make_report(*terms, decode=below))
    assert finding.term == ""
    assert "in 1 of 4 steps are not ranked like those decoded in full: correlation 0.800" in (
        finding.what
    )
    assert "below decode.min_rank_correlation = 0.9" in finding.what
    assert finding.remedy == "raise decode.rollout_steps, or leave it out"
    # At the bound, and where no group has an order.
    for total in (0.9, NAN):
        decode = make_decode(total_rank_correlation=total)
        assert list_findings(make_report(*terms, decode=decode)) == ()


def test_findings_from_a_handful_of_prompts_are_only_what_no_chance_decides() -> None:
    terms = (make_term(advantage_share=1.0), make_term(**UNDEFINED, name="ocr"))
    few, absent = list_findings(make_report(*terms, prompts=9))
    assert few.what.startswith("too few prompts for findings: 9, ")
    assert (absent.term, absent.what) == ("ocr", "applies to none of the 9 prompts")
    drives, _ = list_findings(make_report(*terms, prompts=10))
    assert drives.what.startswith("drives the training almost alone")


@pytest.mark.parametrize(
    ("figures", "what", "remedy"),
    [
        (
            (2.9, 1.9, 3.9),
            "by place 2.9 times (1.9 to 3.9) that by image: the same gradient quality from about "
            "34% of the images (cosine of the mean gradients 0.91)",
            "ten steps with advantage.credit=place and ten with image",
        ),
        (
            (1.5, 0.9, 2.5),
            "1.5 times (0.9 to 2.5) that by image: no measurable difference",
            "keep advantage.credit=image, or compare more batches: --prompts 64",
        ),
        ((0.5, 0.3, 0.8), "(0.3 to 0.8) that by image: a noisier", "keep advantage.credit=image"),
        ((1.5, NAN, NAN), "lost in the noise of 8 batches", "or compare more batches"),
    ],
)
@pytest.mark.parametrize("prompts", [9, 24])
def test_credit_is_judged_by_its_interval(
    figures: tuple[float, float, float], what: str, remedy: str, prompts: int
) -> None:
    report = replace(make_report(make_term(), prompts=prompts), credit=make_credit(*figures))
    (finding,) = (each for each in list_findings(report) if "credit" in each.remedy)
    assert what in finding.what
    assert remedy in finding.remedy
