"""Tables and page of the probe: the figures of the report, and that what it shows is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.report.probe.findings import ProbeReport
from glm_grpo.report.probe.page import ProbedPrompt, probe_tables, write_probe
from rewards.audit.audit import Conflict
from rewards.types import Prompt
from tests.report.probe.reports import (
    NAN,
    UNDEFINED,
    make_credit,
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


def rows_of(report: ProbeReport, first: str) -> list[list[str]]:
    """The rows of all tables that begin with a word."""
    rows = [[*map(str, row)] for table in probe_tables(report) for row in table.rows]
    return [row for row in rows if row[0] == first]


PSNR: dict[str, Any] = {
    **{"name": "psnr", "weight": 0.1, "advantage_share": 0.875, "mean": 23.46, "std": 4.0},
    **{"std_within": 2.0, "flat_fraction": 0.25, "headroom": 2.5, "reconstruction": 30.0},
    **{"room": 6.54, "saturation": 0.25, "decoder_fraction": 1.25, "equal_weight": 0.00325},
}


def test_tables_show_every_figure_of_a_term() -> None:
    lpips = {"weight": 0.4, "advantage_share": 0.125, "mean": 0.3125, "std": 0.0625}
    report = make_report(make_term(**lpips, std_within=0.03125), make_term(**PSNR))
    # Shares and fractions with three decimals, scores with three digits that count.
    assert rows_of(report, "lpips")[:2] == [
        ["lpips", "0.4", "0.125", "0.500", "0.312", "0.0625", "0.0312", "0.000"],
        ["lpips", "0.250", "1.00", "1.00", "0.500", "0.000", "0.125"],
    ]
    assert rows_of(report, "psnr")[:2] == [
        ["psnr", "0.1", "0.875", "0.00325", "23.5", "4.00", "2.00", "0.250"],
        ["psnr", "2.50", "1.00", "30.0", "6.54", "0.250", "1.250"],
    ]
    assert rows_of(report, "total") == [["total", "0.188", *"-----"]]
    assert rows_of(with_other(), "-") == [["-", "nothing stands out", "-"]]


def test_tables_show_a_dash_for_what_has_no_value() -> None:
    report = make_report(
        make_term(**UNDEFINED, advantage_share=0.0),
        make_term(name="ocr", advantage_share=1.0),
        correlations=torch.tensor([[NAN, NAN], [NAN, 1.0]], dtype=torch.float64),
    )
    assert rows_of(report, "lpips")[:3] == [
        ["lpips", "0.5", "0.000", *"-----"],
        ["lpips", *"------"],
        ["lpips", "-", "-"],
    ]


def test_tables_show_how_cheap_rollouts_rank_and_what_they_save() -> None:
    report = make_report(make_term(), make_term(name="ocr"), decode=make_decode())
    assert rows_of(report, "1") == [["1", "36.0", "0.969", "-", "0.900"]]
    assert rows_of(report, "4") == [["4", "24.0", "-", "-", "-"]]
    assert "fewer steps are 1.50 x as fast" in probe_tables(report)[3].note
    assert rows_of(with_other(), "1") == []


def test_tables_show_the_signal_to_noise_ratio_of_each_kind_of_credit() -> None:
    report = replace(with_other(), credit=make_credit())
    assert rows_of(report, "by image") == [["by image", "0.0876", "1.00", "-", "1.00", "1.00"]]
    assert rows_of(report, "by place, later 0.25") == [
        ["by place, later 0.25", "0.254", "2.90", "1.90 to 3.90", "0.91", "1.46"]
    ]
    name = "by place, later 1 (reward-to-go)"
    assert rows_of(report, name) == [[name, "-0.0100", *"----"]]
    title = "gradient by image or by place: 8 batches of 32 images"
    assert title in [table.title for table in probe_tables(report)]


WRITTEN = make_report(
    make_term(weight=0.3, advantage_share=0.875),
    make_term(
        **{"name": HOSTILE, "weight": 0.1, "advantage_share": 0.125},
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


def test_page_shows_advice_first_then_figures_with_bars(path: Path, page: Any) -> None:
    titles = ["Conflicts", "Findings", "What drives the advantage: 24 prompts, 8 samples each"]
    assert [text for text in page.texts if text in titles] == titles
    assert page.after("correlation inside groups", 2) == [f"lpips and {HOSTILE}", "-0.500"]
    assert page.after("what to do", 2) == [
        "lpips",
        "drives the training almost alone: 0.875 of the advantage for 0.750 of the weights",
    ]
    start = page.texts.index("Correlation inside groups")
    assert page.texts[start + 1 : start + 10] == [
        *("term", "lpips", HOSTILE, "lpips", "1.000", "-0.500", HOSTILE, "-0.500", "1.000"),
    ]
    # Shares of weights and advantage, the decoder's part, and correlations, orange below 0.
    bars = re.findall(r"--c(\d)\) 40%, transparent\) ([\d.]+)%", path.read_text())
    assert bars == [
        *(("0", "75.0"), ("0", "87.5"), ("0", "25.0"), ("0", "12.5"), *2 * [("0", "12.5")]),
        *(("0", "100.0"), ("1", "50.0"), ("1", "50.0"), ("0", "100.0")),
    ]


def test_page_shows_target_reconstruction_best_and_worst_sample(path: Path, page: Any) -> None:
    assert page.after("a sign", 7) == [
        *("Target", "Target's own tokens", "total", "0.875"),
        *("Best of 3", "total", "0.750"),
    ]
    assert page.after("no target", 3) == ["Best of 2", "total", "0.750"]
    assert page.after("no total", 4) == ["Target", "Target's own tokens", "total", "-"]
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
    assert "Images" not in read_page(path).texts
    assert not re.search(r"\bnan\b", path.read_text(), re.IGNORECASE)
