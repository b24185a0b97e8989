from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from glm_grpo.probe.findings import (
    ProbedDecode,
    ProbedTerm,
    ProbeReport,
    list_findings,
)
from glm_grpo.probe.page import (
    Bars,
    ProbedPrompt,
    Range,
    draw_bars,
    draw_matrix,
    draw_ranges,
    probe_tables,
    proposed_overrides,
    write_probe,
)
from rewards.audit.audit import Conflict, RewardAudit, TermAudit
from rewards.types import Prompt

NAN = float("nan")
ReadPage = Callable[[Path], Any]
HOSTILE = '"><script>alert(1)</script>\' onerror="x" {{ 7 * 7 }} & [red] $x_1$ שלום 🙂'
AUDITED = (
    *("name", "mean", "std", "std_within", "flat_fraction"),
    *("advantage_share", "headroom", "saturation"),
)
HEALTHY: dict[str, Any] = {
    **{"name": "lpips", "mean": 0.5, "std": 0.25, "std_within": 0.125, "flat_fraction": 0.0},
    **{"advantage_share": 0.5, "headroom": 0.25, "saturation": 0.0},
    **{"weight": 0.5, "reconstruction": 1.0, "room": 0.5, "decoder_fraction": 0.125},
    "proposed_weight": None,
}
"""A term of which there is nothing to say."""
UNDEFINED = dict.fromkeys(
    (
        *("mean", "std", "std_within", "flat_fraction", "headroom", "saturation"),
        *("reconstruction", "room", "decoder_fraction"),
    ),
    NAN,
)
"""What the audit gives for a term that applies to no prompt."""


def make_term(**overrides: Any) -> ProbedTerm:
    figures = HEALTHY | overrides
    return ProbedTerm(
        audit=TermAudit(**{key: figures[key] for key in AUDITED}),
        **{key: value for key, value in figures.items() if key not in AUDITED},
    )


def make_report(
    *terms: ProbedTerm,
    correlations: Tensor | None = None,
    conflicts: tuple[Conflict, ...] = (),
    prompts: int = 24,
    decode: ProbedDecode | None = None,
) -> ProbeReport:
    if correlations is None:
        correlations = torch.eye(len(terms), dtype=torch.float64)
    audit = RewardAudit(tuple(term.audit for term in terms), correlations, headroom=0.1875)
    return ProbeReport(terms, audit, conflicts, prompts=prompts, group_size=8, decode=decode)


def with_other(**overrides: Any) -> ProbeReport:
    """A report of a term and of a healthy one of the same weight."""
    return make_report(make_term(**overrides), make_term(name="ocr"))


def make_prompt(
    text: str = "a sign", *, totals: tuple[float, ...] = (0.25, 0.75), has_target: bool = True
) -> ProbedPrompt:
    """Sample i is of grey 10 i; the target is white, its own tokens nearly so."""
    target = torch.full((3, 32, 64), 255, dtype=torch.uint8)
    samples = [torch.full((3, 32, 64), 10 * index) for index in range(len(totals))]
    return ProbedPrompt(
        prompt=Prompt(text, text, target=target if has_target else None),
        pixels=torch.stack(samples).to(torch.uint8),
        totals=torch.tensor(totals),
        reconstructed_pixels=target - 5 if has_target else None,
        reconstruction_total=0.875 if has_target else NAN,
    )


def print_tables(report: ProbeReport, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    for table in probe_tables(report):
        console.print(table)
    return console.file.getvalue()


def cells_of(text: str, first: str) -> list[list[str]]:
    """Cells of all rows that begin with a word."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return [row for row in rows if row and row[0] == first]


def test_findings_are_none_for_a_reward_without_fault() -> None:
    assert list_findings(with_other()) == ()


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
            "has next to no say: 0.050 of the advantage for 0.500 of the weights",
            "--share lpips=...",
        ),
        (
            {"advantage_share": -0.25},
            {},
            "is outvoted, -0.250 of the advantage for 0.500 of the weights",
            "--share lpips=...",
        ),
        (
            {"advantage_share": 0.81},
            {"advantage_share": 0.8},
            "drives the training almost alone: 0.810 of the advantage",
            "--share lpips=...",
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
            "the best of 8 is 0.0200 above the mean, 4.0% of the room to the targets' own tokens",
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
            "is there already: the samples score 0.500, the targets' own tokens 0.525",
            "weight 0 and reward.watch=[lpips]",
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
            "is scored in evaluations alone (when: evaluation), so not by the probe",
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


def test_findings_take_a_share_of_a_mostly_flat_term_for_what_it_is() -> None:
    findings = list_findings(
        with_other(flat_fraction=0.75, saturation=0.75, advantage_share=0.9, headroom=0.001)
    )
    assert [finding.what[:12] for finding in findings] == ["scores all i", "drives the t"]


def test_findings_say_nothing_of_terms_that_are_only_watched() -> None:
    bad = {"flat_fraction": 0.75, "decoder_fraction": 2.0, "room": 0.0, "headroom": 0.0}
    assert list_findings(with_other(weight=0.0, advantage_share=0.0, **bad)) == ()
    (finding,) = list_findings(with_other(**UNDEFINED, weight=0.0, advantage_share=0.0))
    assert finding.what == "applies to none of the 24 prompts"


def test_findings_look_for_no_ceiling_of_a_term_that_is_to_be_pushed_down() -> None:
    limits = {"headroom": 0.0, "saturation": 1.0, "room": -1.0}
    assert len(list_findings(with_other(**limits))) == 3
    assert list_findings(with_other(**limits, weight=-0.5)) == ()


def test_findings_let_a_single_term_drive_the_training() -> None:
    watched = make_term(name="ocr", weight=0.0, advantage_share=0.0)
    assert list_findings(make_report(make_term(advantage_share=1.0), watched)) == ()


def test_findings_name_terms_that_ask_for_the_same() -> None:
    alike = torch.tensor([[1.0, 0.97], [0.97, 1.0]], dtype=torch.float64)
    (finding,) = list_findings(make_report(make_term(), make_term(name="ocr"), correlations=alike))
    assert (finding.term, "0.97" in finding.what) == ("lpips, ocr", True)
    # One is pushed down, or only watched: they do not ask for the same.
    for weight in (-0.5, 0.0):
        other = make_term(name="ocr", weight=weight, advantage_share=0.5 if weight else 0.0)
        assert list_findings(make_report(make_term(), other, correlations=alike)) == ()


def test_findings_refer_to_proposed_weights_where_there_are_some() -> None:
    (finding,) = list_findings(with_other(advantage_share=0.9, proposed_weight=0.123456))
    assert finding.remedy.startswith("set the proposed weights, all of them")


@pytest.mark.parametrize("proposed", [None, 0.943])
def test_findings_leave_out_a_term_that_has_nothing_to_gain(proposed: float | None) -> None:
    top = {"mean": 0.994, "std": 0.004, "headroom": 0.005, "reconstruction": NAN, "room": NAN}
    top |= {"name": "aesthetic", "advantage_share": 0.002, "proposed_weight": proposed}
    ocr = make_term(name="ocr", advantage_share=0.998, proposed_weight=proposed)
    # Nor is the other term said to drive the training alone: it is to.
    (finding,) = list_findings(make_report(make_term(**top), ocr))
    assert finding.what == (
        "has next to no say and nothing to gain: 0.002 of the advantage for 0.500 of the weights; "
        "the best of 8 is 0.00500 above the mean of 0.994"
    )
    assert finding.remedy == (
        "leave it out, or only watch it: weight 0 and reward.watch=[aesthetic]"
    )
    # A hundredth of the mean above it there is something to gain.
    whats = [
        each.what[:12]
        for each in list_findings(make_report(make_term(**top | {"headroom": 0.01}), ocr))
    ]
    assert whats == ["has next to ", "drives the t"]


def test_tables_show_every_figure_of_a_term() -> None:
    text = print_tables(
        make_report(
            make_term(
                weight=0.4, advantage_share=0.125, mean=0.3125, std=0.0625, std_within=0.03125
            ),
            make_term(
                **{"name": "psnr", "weight": 0.1, "advantage_share": 0.875, "mean": 23.46},
                **{"std": 4.0, "std_within": 2.0, "flat_fraction": 0.25, "headroom": 2.5},
                **{
                    "reconstruction": 30.0,
                    "room": 6.54,
                    "saturation": 0.25,
                    "decoder_fraction": 1.25,
                },
            ),
        )
    )
    # Shares and fractions with three decimals, scores with three digits that count.
    assert cells_of(text, "lpips")[:2] == [
        ["lpips", "0.4", "0.125", "0.312", "0.0625", "0.0312", "0.000"],
        ["lpips", "0.250", "1.00", "0.500", "0.000", "0.125"],
    ]
    assert cells_of(text, "psnr")[:2] == [
        ["psnr", "0.1", "0.875", "23.5", "4.00", "2.00", "0.250"],
        ["psnr", "2.50", "30.0", "6.54", "0.250", "1.250"],
    ]
    assert cells_of(text, "total") == [["total", "0.188", "-", "-", "-", "-"]]
    assert "24 prompts, 8 samples each" in text


def test_tables_show_proposed_weights_where_they_were_asked_for() -> None:
    report = make_report(
        make_term(proposed_weight=0.2718281), make_term(name="ocr", proposed_weight=0.0)
    )
    text = print_tables(report)
    assert "proposed" in text
    assert [row[3] for row in (cells_of(text, "lpips")[0], cells_of(text, "ocr")[0])] == [
        *("0.2718", "0")
    ]
    assert proposed_overrides(report) == ("lpips=0.2718", "ocr=0")
    assert proposed_overrides(with_other()) == ()
    assert "proposed" not in print_tables(with_other())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0.0, "0.00"), (5e-17, "0.00"), (NAN, "-"), (-0.5, "-0.500"), (0.00012345, "0.000123")),
        *((123.4, "123"), (0.9996, "1.00")),
    ],
)
def test_tables_show_scores_of_any_size(value: float, shown: str) -> None:
    text = print_tables(with_other(reconstruction=value))
    assert cells_of(text, "lpips")[1][2] == shown


def test_tables_show_a_dash_for_what_has_no_value() -> None:
    text = print_tables(
        make_report(
            make_term(**UNDEFINED, advantage_share=0.0),
            make_term(name="ocr", advantage_share=1.0),
            correlations=torch.tensor([[NAN, NAN], [NAN, 1.0]], dtype=torch.float64),
        )
    )
    assert cells_of(text, "lpips")[:3] == [
        ["lpips", "0.5", "0.000", "-", "-", "-", "-"],
        ["lpips", *"-----"],
        ["lpips", "-", "-"],
    ]
    assert "nan" not in text


def test_tables_show_correlations_and_a_line_for_each_conflict() -> None:
    correlations = torch.tensor(
        [[1.0, -0.75, -0.0001], [-0.75, 1.0, -0.5], [-0.0001, -0.5, 1.0]], dtype=torch.float64
    )
    report = make_report(
        *(make_term(name=name) for name in ("lpips", "ocr", "ssim")),
        correlations=correlations,
        conflicts=(Conflict("lpips", "ocr", -0.75), Conflict("ocr", "ssim", -0.5)),
    )
    text = print_tables(report)
    assert cells_of(text, "ocr")[2] == ["ocr", "-0.750", "1.000", "-0.500"]
    assert cells_of(text, "ssim")[2] == ["ssim", "0.000", "-0.500", "1.000"]
    assert cells_of(text, "lpips and ocr: correlation -0.750")
    assert cells_of(text, "ocr and ssim: correlation -0.500")
    assert "conflicts" not in print_tables(with_other())


def make_decode(**overrides: Any) -> ProbedDecode:
    figures: dict[str, Any] = {
        **{"steps": 1, "full_steps": 4, "rank_correlations": (0.96875, NAN)},
        **{"total_rank_correlation": 0.9, "min_rank_correlation": 0.9},
        **{"images_per_second": 36.0, "full_images_per_second": 24.0},
    }
    return ProbedDecode(**(figures | overrides))


def test_tables_show_how_cheap_rollouts_rank_and_what_they_save() -> None:
    report = make_report(make_term(), make_term(name="ocr"), decode=make_decode())
    text = print_tables(report)
    assert "cheaper decode of rollouts" in text
    assert cells_of(text, "1") == [["1", "36.0", "0.969", "-", "0.900"]]
    assert cells_of(text, "4") == [["4", "24.0", "-", "-", "-"]]
    assert "fewer steps are 1.50 x as fast" in " ".join(text.split())
    assert "cheaper decode" not in print_tables(with_other())


def test_findings_say_that_a_run_would_fall_back_to_the_full_decode() -> None:
    terms = (make_term(), make_term(name="ocr"))
    below = make_decode(total_rank_correlation=0.8)
    (finding,) = list_findings(make_report(*terms, decode=below))
    assert finding.term == ""
    assert "in 1 of 4 steps are not ranked as those decoded in full: correlation 0.800" in (
        finding.what
    )
    assert "below decode.min_rank_correlation = 0.9" in finding.what
    assert finding.remedy == "raise decode.rollout_steps, or leave it out"
    # At the bound, and where no group has an order.
    for total in (0.9, NAN):
        decode = make_decode(total_rank_correlation=total)
        assert list_findings(make_report(*terms, decode=decode)) == ()


def test_page_shows_how_cheap_rollouts_rank(tmp_path: Path, read_page: ReadPage) -> None:
    report = make_report(make_term(), make_term(name="ocr"), decode=make_decode())
    page = read_page(write_probe(report, [], tmp_path))
    assert page.after("Cheaper decode of rollouts", 15) == [
        *("steps", "images/s", "lpips", "ocr", "total"),
        *("1", "36.0", "0.969", "-", "0.900"),
        *("4", "24.0", "-", "-", "-"),
    ]


def test_tables_of_a_single_term_correlate_nothing() -> None:
    assert "correlation" not in print_tables(make_report(make_term(advantage_share=1.0)))


def test_tables_end_with_the_findings_or_say_that_there_are_none() -> None:
    text = print_tables(with_other(decoder_fraction=0.75), width=300)
    (row,) = [row for row in cells_of(text, "lpips") if len(row) == 3 and "noise" in row[1]]
    assert row[2].startswith("lower its weight")
    assert "nothing stands out" not in text
    assert cells_of(print_tables(with_other()), "")[-1] == ["", "nothing stands out", ""]


def test_tables_fit_an_ordinary_terminal() -> None:
    narrow = {"std": 0.0483, "std_within": 0.0459, "proposed_weight": 0.12345}
    names = ("lpips", "ssim", "ocr", "aesthetic")
    text = print_tables(make_report(*(make_term(name=name, **narrow) for name in names)), width=80)
    # No name is broken, in none of the three tables.
    assert len(cells_of(text, "aesthetic")) == 3


def test_tables_take_names_as_they_are() -> None:
    text = print_tables(with_other(name="[red]x[/red]"))
    # A row of three tables, and a column of the last.
    assert len(cells_of(text, "[red]x[/red]")) == 3
    assert text.count("[red]x[/red]") == 4


WRITTEN = make_report(
    make_term(weight=0.3, advantage_share=0.875, proposed_weight=0.25),
    make_term(
        **{"name": HOSTILE, "weight": 0.1, "advantage_share": 0.125, "proposed_weight": 0.75},
        **{"reconstruction": NAN, "room": NAN},
    ),
    correlations=torch.tensor([[1.0, -0.5], [-0.5, 1.0]], dtype=torch.float64),
    conflicts=(Conflict("lpips", HOSTILE, -0.5),),
)
PROMPTS = (
    make_prompt("a sign", totals=(0.5, 0.75, 0.25)),
    make_prompt("flat", totals=(0.5, 0.5, 0.5)),
    make_prompt("no target", has_target=False),
    replace(make_prompt("no total"), reconstruction_total=NAN),
    make_prompt(HOSTILE),
    make_prompt("lone \udcff"),
    make_prompt("word " * 1000),
    make_prompt("eighth"),
    make_prompt("ninth"),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with something of everything."""
    return write_probe(WRITTEN, PROMPTS, tmp_path_factory.mktemp("probe") / "a #1 50%")


@pytest.fixture(scope="module")
def page(path: Path, read_page: ReadPage) -> Any:
    return read_page(path)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, read_page: ReadPage) -> Any:
    """A page of which there is nothing to say, of one term and one prompt."""
    prompt = replace(
        make_prompt(has_target=False), pixels=torch.zeros(2, 3, 8, 256, dtype=torch.uint8)
    )
    report = make_report(make_term(advantage_share=1.0), prompts=1)
    return read_page(write_probe(report, [prompt], tmp_path_factory.mktemp("quiet")))


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a term that applies to no prompt, without samples."""
    report = make_report(
        make_term(**UNDEFINED, advantage_share=0.0),
        make_term(name="ocr", advantage_share=0.75),
        correlations=torch.full((2, 2), math.nan, dtype=torch.float64),
    )
    return write_probe(report, [], tmp_path_factory.mktemp("empty"))


def test_page_shows_the_figures_of_the_tables(page: Any) -> None:
    start = page.texts.index("What drives the advantage: 24 prompts, 8 samples each")
    assert page.texts[start + 1 : start + 25] == [
        *("term", "weight", "share", "proposed weight", "mean", "std", "std inside groups"),
        "flat groups",
        *("lpips", "0.3", "0.875", "0.25", "0.500", "0.250", "0.125", "0.000"),
        *(HOSTILE, "0.1", "0.125", "0.75", "0.500", "0.250", "0.125", "0.000"),
    ]
    start = page.texts.index("total")
    assert page.texts[start + 1 : start + 6] == ["0.188", *"----"]
    start = page.texts.index("Correlation inside groups", start)
    assert page.texts[start + 1 : start + 9] == [
        *("lpips", HOSTILE, "lpips", "1.000", "-0.500", HOSTILE, "-0.500", "1.000"),
    ]


def test_page_shows_findings_and_conflicts(page: Any) -> None:
    start = page.texts.index("Findings")
    assert page.texts[start + 1 : start + 4] == [
        "lpips",
        "drives the training almost alone: 0.875 of the advantage for 0.750 of the weights.",
        "What to do: set the proposed weights, all of them: one alone gives other shares.",
    ]
    assert f"lpips and {HOSTILE}: correlation -0.500" in page.texts


def test_page_without_faults_says_so(quiet: Any) -> None:
    assert "Nothing stands out." in quiet.texts
    assert "Conflicts" not in quiet.texts


def test_page_describes_its_drawings(page: Any) -> None:
    alternatives = page.alternatives()
    assert alternatives["shares.png"] == (
        "Share of the advantage. lpips: 0.750 of the weights, 0.875 of the advantage; "
        f"{HOSTILE}: 0.250 of the weights, 0.125 of the advantage"
    )
    # The best of 8 is mean and headroom.
    assert alternatives["headroom.png"] == (
        "Headroom. lpips: mean 0.500, best of 8 0.750, targets' own tokens 1.00; "
        f"{HOSTILE}: mean 0.500, best of 8 0.750, targets' own tokens -"
    )
    assert alternatives["correlations.png"] == (
        f"Correlation inside groups. lpips and {HOSTILE} -0.500"
    )
    assert alternatives["decoder.png"] == f"Decoder's part. lpips: 0.125; {HOSTILE}: 0.125"


def test_page_says_below_each_drawing_how_to_read_it(page: Any) -> None:
    # The drawings come before the tables, of which one has the same heading.
    heading = page.texts.index("Correlation inside groups")
    assert page.texts[heading + 1] == (
        "Near 1: two terms ask for the same. Below 0: they pull against each other."
    )
    captions = [text for text in page.texts if text.startswith(("What tells", "Each term on"))]
    assert len(captions) == 2


def test_page_has_each_drawing_for_light_and_for_dark_ground(path: Path, page: Any) -> None:
    drawings = [image for image in page.all("img") if "prompt-" not in str(image["src"])]
    for image, source in zip(drawings, page.all("source"), strict=True):
        assert source["media"] == "(prefers-color-scheme: dark)"
        light, dark = (
            Image.open(path.parent / str(name)) for name in (image["src"], source["srcset"])
        )
        assert light.size == dark.size
        assert light.width == 880
        assert light.height > 200
        assert light.convert("L").getpixel((2, 2)) > 200 > 100 > dark.convert("L").getpixel((2, 2))


def test_page_draws_the_figures_of_the_report(path: Path) -> None:
    names = WRITTEN.names()
    shares = [
        Bars("share of the weights", (0.75, 0.25)),
        Bars("share of the advantage", (0.875, 0.125)),
    ]
    scores = [Range(names[0], 0.5, 0.75, 1.0), Range(names[1], 0.5, 0.75, NAN)]
    parts = [Bars("decoder's part", (0.125, 0.125))]
    expected = {
        "shares.png": draw_bars(names, shares, mark=None, is_dark=False),
        "headroom-dark.png": draw_ranges(scores, best_label="best of 8", is_dark=True),
        "correlations.png": draw_matrix(names, WRITTEN.audit.correlations, is_dark=False),
        "decoder-dark.png": draw_bars(names, parts, mark=0.5, is_dark=True),
    }
    for name, content in expected.items():
        assert (path.parent / name).read_bytes() == content, name


def test_page_of_a_single_term_draws_no_correlation(quiet: Any) -> None:
    drawings = {name for name in quiet.alternatives() if "prompt-" not in str(name)}
    assert drawings == {"shares.png", "headroom.png", "decoder.png"}


def test_page_shows_target_reconstruction_best_and_worst_sample(path: Path, page: Any) -> None:
    assert page.after("a sign", 7) == [
        *("Target", "Target's own tokens", "0.875"),
        *("Best of 3", "0.750", "Worst of 3", "0.250"),
    ]
    greys = {"target": 255, "own": 250, "best": 10, "worst": 20}
    for name, grey in greys.items():
        picture = Image.open(path.parent / f"prompt-1-{name}.png")
        assert picture.mode == "RGB"
        # As it was decoded, to the bit.
        np.testing.assert_array_equal(np.asarray(picture), np.full((32, 64, 3), grey))


def test_page_describes_its_pictures(page: Any) -> None:
    alternatives = page.alternatives()
    assert alternatives["prompt-1-own.png"] == "Target's own tokens: a sign"
    assert alternatives["prompt-1-worst.png"] == "Worst of 3: a sign"
    # A prompt without end is cut.
    assert 100 < len(alternatives["prompt-7-best.png"]) < 150
    assert {image["loading"] for image in page.all("img")} == {"lazy"}


def test_page_shows_two_samples_of_a_flat_group(path: Path) -> None:
    best, worst = (Image.open(path.parent / f"prompt-2-{name}.png") for name in ("best", "worst"))
    assert best.getpixel((0, 0)) != worst.getpixel((0, 0))


def test_page_shows_no_target_and_no_total_where_there_is_none(path: Path, page: Any) -> None:
    assert page.after("no target", 4) == ["Best of 2", "0.750", "Worst of 2", "0.250"]
    assert page.after("no total", 3) == ["Target", "Target's own tokens", "-"]
    assert not (path.parent / "prompt-3-target.png").exists()


def test_page_shows_the_samples_of_eight_prompts(
    page: Any, quiet: Any, empty: Path, read_page: ReadPage
) -> None:
    assert "eighth" in page.texts
    assert "ninth" not in page.texts
    assert any("The first 8 of 24 prompts." in text for text in page.texts)
    assert not any("The first" in text for text in quiet.texts)
    assert "Samples" in quiet.texts
    assert "Samples" not in read_page(empty).texts


def test_page_keeps_the_pixels_of_small_pictures_sharp(page: Any, quiet: Any) -> None:
    # 64 pixels wide and 256.
    assert page.all("body")[0].get("class") == "small"
    assert quiet.all("body")[0].get("class") is None


def test_page_shows_a_dash_for_what_has_no_value(empty: Path, read_page: ReadPage) -> None:
    page = read_page(empty)
    start = page.texts.index("What is left to gain, and what is chance")
    assert page.texts[start + 7 : start + 13] == ["lpips", *"-----"]
    assert not re.search(r"\bnan\b", empty.read_text(), re.IGNORECASE)


def test_page_keeps_hostile_text_as_text(page: Any) -> None:
    assert page.all("script") == []
    names = {name for _, attributes in page.elements for name in attributes}
    assert not [name for name in names if name.startswith("on")]
    # A row of each of three tables, a column of the last, and a prompt.
    assert page.texts.count(HOSTILE) == 5
    assert f"lpips=0.25 {HOSTILE}=0.75" in page.texts
    assert page.alternatives()["prompt-5-best.png"] == f"Best of 2: {HOSTILE}"
    # What UTF-8 cannot hold.
    assert "lone ?" in page.texts


def test_page_lets_a_prompt_choose_its_direction(page: Any) -> None:
    directed = [tag for tag, attributes in page.elements if attributes.get("dir") == "auto"]
    assert directed == ["p"] * 8


def test_page_loads_nothing_but_the_files_beside_it(path: Path, page: Any) -> None:
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<iframe", path.read_text())
    linked = page.linked()
    assert linked == {file.name for file in path.parent.glob("*.png")}
    # Four drawings twice, and four pictures of each prompt but the one without a target.
    assert len(linked) == 8 + 7 * 4 + 2


def test_page_and_pictures_are_the_same_every_time(path: Path, tmp_path: Path) -> None:
    again = write_probe(WRITTEN, PROMPTS, tmp_path)
    assert again == tmp_path / "index.html"
    first, second = (
        {file.name: file.read_bytes() for file in page.parent.iterdir()} for page in (path, again)
    )
    assert first == second
