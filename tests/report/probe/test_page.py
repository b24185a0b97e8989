"""Tables and page of the probe: the figures of the report, and that what it shows is escaped."""

from __future__ import annotations

import io
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

from glm_grpo.report.probe.findings import ProbeReport
from glm_grpo.report.probe.page import ProbedPrompt, probe_tables, proposed_overrides, write_probe
from rewards.audit.audit import Conflict
from rewards.types import Prompt
from tests.report.probe.reports import (
    NAN,
    UNDEFINED,
    make_decode,
    make_report,
    make_term,
    with_other,
)

HOSTILE = '"><script>alert(1)</script>\' onerror="x" {{ 7 * 7 }} & [red] $x_1$ שלום 🙂'


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


PSNR: dict[str, Any] = {
    **{"name": "psnr", "weight": 0.1, "advantage_share": 0.875, "mean": 23.46, "std": 4.0},
    **{"std_within": 2.0, "flat_fraction": 0.25, "headroom": 2.5, "reconstruction": 30.0},
    **{"room": 6.54, "saturation": 0.25, "decoder_fraction": 1.25},
}


def test_tables_show_every_figure_of_a_term() -> None:
    lpips = {"weight": 0.4, "advantage_share": 0.125, "mean": 0.3125, "std": 0.0625}
    text = print_tables(make_report(make_term(**lpips, std_within=0.03125), make_term(**PSNR)))
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
    assert cells_of(print_tables(with_other()), "")[-1] == ["", "nothing stands out", ""]


def test_tables_show_proposed_weights_where_they_were_asked_for() -> None:
    report = make_report(
        make_term(proposed_weight=0.2718281), make_term(name="ocr", proposed_weight=0.0)
    )
    text = print_tables(report)
    assert [cells_of(text, name)[0][3] for name in ("lpips", "ocr")] == ["0.2718", "0"]
    assert proposed_overrides(report) == ("lpips=0.2718", "ocr=0")
    assert proposed_overrides(with_other()) == ()
    assert "proposed" not in print_tables(with_other())


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
    correlations = torch.tensor([[1.0, -0.75], [-0.75, 1.0]], dtype=torch.float64)
    report = make_report(
        *(make_term(name=name) for name in ("lpips", "ocr")),
        correlations=correlations,
        conflicts=(Conflict("lpips", "ocr", -0.75),),
    )
    text = print_tables(report)
    assert cells_of(text, "ocr")[2] == ["ocr", "-0.750", "1.000"]
    assert cells_of(text, "lpips and ocr: correlation -0.750")
    assert "conflicts" not in print_tables(with_other())


def test_tables_show_how_cheap_rollouts_rank_and_what_they_save() -> None:
    report = make_report(make_term(), make_term(name="ocr"), decode=make_decode())
    text = print_tables(report)
    assert cells_of(text, "1") == [["1", "36.0", "0.969", "-", "0.900"]]
    assert cells_of(text, "4") == [["4", "24.0", "-", "-", "-"]]
    assert "fewer steps are 1.50 x as fast" in " ".join(text.split())
    assert "cheaper decode" not in print_tables(with_other())


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
    *map(make_prompt, ("sixth", "seventh", "eighth", "ninth")),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with something of everything."""
    return write_probe(WRITTEN, PROMPTS, tmp_path_factory.mktemp("probe") / "a #1 50%")


@pytest.fixture(scope="module")
def page(path: Path, read_page: Callable[[Path], Any]) -> Any:
    return read_page(path)


def test_page_shows_the_figures_of_the_tables(page: Any) -> None:
    start = page.texts.index("What drives the advantage: 24 prompts, 8 samples each")
    assert page.texts[start + 9 : start + 25] == [
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
    assert page.after("Findings", 3) == [
        "lpips",
        "drives the training almost alone: 0.875 of the advantage for 0.750 of the weights.",
        "What to do: set the proposed weights, all of them: one alone gives other shares.",
    ]
    assert f"lpips and {HOSTILE}: correlation -0.500" in page.texts


def test_page_describes_its_charts_by_their_figures(page: Any) -> None:
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
    assert alternatives["correlations.png"].endswith(f"lpips and {HOSTILE} -0.500")
    assert alternatives["decoder.png"] == f"Decoder's part. lpips: 0.125; {HOSTILE}: 0.125"


def test_page_shows_target_reconstruction_best_and_worst_sample(path: Path, page: Any) -> None:
    assert page.after("a sign", 7) == [
        *("Target", "Target's own tokens", "0.875"),
        *("Best of 3", "0.750", "Worst of 3", "0.250"),
    ]
    assert page.after("no target", 4) == ["Best of 2", "0.750", "Worst of 2", "0.250"]
    assert page.after("no total", 3) == ["Target", "Target's own tokens", "-"]
    greys = {"1-target": 255, "1-own": 250, "1-best": 10, "1-worst": 20}
    # Of a flat group two different samples.
    for name, grey in {**greys, "2-best": 0, "2-worst": 20}.items():
        picture = np.asarray(Image.open(path.parent / f"prompt-{name}.png"))
        assert picture.shape == (32, 64, 3)
        if name in greys:
            # As it was decoded, to the bit.
            assert (picture == grey).all()
    assert "eighth" in page.texts
    assert "ninth" not in page.texts


def test_page_shows_what_users_wrote_as_text(path: Path, page: Any) -> None:
    assert page.all("script") == []
    names = {name for _, attributes in page.elements for name in attributes}
    assert not [name for name in names if name.startswith("on")]
    # A row of each of three tables, a column of the last, and a prompt.
    assert page.texts.count(HOSTILE) == 5
    assert page.alternatives()["prompt-5-best.png"] == f"Best of 2: {HOSTILE}"
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<iframe", path.read_text())
    assert page.linked() == {file.name for file in path.parent.glob("*.png")}


def test_page_of_what_has_no_value_and_no_samples(
    tmp_path: Path, read_page: Callable[[Path], Any]
) -> None:
    report = make_report(
        make_term(**UNDEFINED, advantage_share=0.0),
        make_term(name="ocr", advantage_share=0.75),
        correlations=torch.full((2, 2), NAN, dtype=torch.float64),
        decode=make_decode(),
    )
    path = write_probe(report, [], tmp_path)
    page = read_page(path)
    start = page.texts.index("What is left to gain, and what is chance")
    assert page.texts[start + 7 : start + 13] == ["lpips", *"-----"]
    assert "Samples" not in page.texts
    assert "Cheaper decode of rollouts" in page.texts
    assert not re.search(r"\bnan\b", path.read_text(), re.IGNORECASE)
