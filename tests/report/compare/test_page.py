"""The page of a comparison: its figures, its pictures, and that what it shows is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from glm_grpo.report.compare.comparison import (
    ComparedPicture,
    ComparedPrompt,
    ComparedRun,
    Comparison,
    TradeOff,
)
from glm_grpo.report.compare.page import comparison_tables, spread, write_comparison
from glm_grpo.run.summaries import Interval

HOSTILE = '<script>alert(1)</script> " onload=x $x^2$ {{ 7 * 7 }} & [red]'
FIRST = ComparedRun(
    name="a",
    settings={"reward.terms.ocr.weight": "0.3"},
    steps=(0, 20),
    totals=(0.3125, 0.5625),
    gain=Interval(0.25, 0.125, 0.375),
    over_first=None,
    terms={"ocr": 0.375, "lpips": 0.75},
)
SECOND = ComparedRun(
    name=HOSTILE,
    settings={"data.path": HOSTILE},
    steps=(0, 10, 20),
    totals=(0.3125, 0.25, 0.1875),
    gain=Interval(-0.125, -0.25, -0.0625),
    over_first=Interval(-0.375, -0.75, 0.0),
    terms={"ocr": 0.875, "lpips": 0.25},
)
COMPARISON = Comparison(
    weights={"ocr": 0.5, "lpips": -0.5},
    prompts=2,
    samples_per_prompt=4,
    runs=(FIRST, SECOND),
    untrained={"ocr": 0.25, "lpips": 0.5},
    trade_offs=(TradeOff("ocr", "lpips", is_optimal=(False, True)),),
    left_out=("ssim", "hps"),
    side_by_side=(),
)


def make_prompt(
    folder: Path, prompt_id: str, *totals: tuple[float, ...], **changes: Any
) -> ComparedPrompt:
    """`totals`: for each sample that of the untrained model, then that of every run."""
    samples = tuple(
        tuple(
            ComparedPicture(
                path=folder / f"{prompt_id}-{sample}-{column}.png",
                total=total,
                scores={"ocr": total / 2, "lpips": None},
            )
            for column, total in enumerate(row)
        )
        for sample, row in enumerate(totals)
    )
    for picture in (picture for row in samples for picture in row):
        Image.new("RGB", (16, 8), (0, 128, 255)).save(picture.path)
    values = {"prompt": f"prompt {prompt_id}", "texts": (), "target": None, **changes}
    return ComparedPrompt(prompt_id=prompt_id, samples=samples, **values)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with something of everything."""
    pictures = tmp_path_factory.mktemp("pictures")
    better = make_prompt(
        *(pictures, "better", (0.25, 0.5, 1.0), (0.25, 0.75, 0.75)),
        target=pictures / "gone.png",
        texts=(HOSTILE,),
    )
    others = (
        make_prompt(pictures, "same", (0.0, 0.5, 0.5)),
        make_prompt(pictures, "worse", (0.0, 0.5, 0.375), prompt=f"prompt {HOSTILE}"),
    )
    Image.new("RGB", (1024, 512)).save(others[0].samples[0][1].path)
    comparison = replace(COMPARISON, side_by_side=(others[0], others[1], better))
    folder = tmp_path_factory.mktemp("compare") / "page"
    return write_comparison(comparison, folder, has_samples=True)


@pytest.fixture(scope="module")
def page(path: Path, read_page: Callable[[Path], Any]) -> Any:
    return read_page(path)


def test_labels_are_the_settings_where_all_of_them_are_short() -> None:
    # "data.path=" and 34 characters fit, one more does not; nor does a run without a difference.
    fits, too_long, nothing = (
        replace(COMPARISON, runs=(FIRST, replace(SECOND, name="b", settings=settings)))
        for settings in ({"data.path": "p" * 34}, {"data.path": "p" * 35}, {})
    )
    assert fits.labels() == ("1: ocr.weight=0.3", f"2: data.path={'p' * 34}")
    assert too_long.labels() == nothing.labels() == ("1: a", "2: b")


def test_page_shows_every_figure(page: Any) -> None:
    assert "Weights: ocr 0.5, lpips -0.5" in page.texts
    assert any("2 held-out prompts, 4 images each" in text for text in page.texts)
    # By the weights: run, last step, before, after, gain with interval, and that over run 1.
    start = page.texts.index("20") - 1
    assert page.texts[start : start + 16] == [
        *("1", "20", "0.312", "0.562", "+0.250", "[+0.125, +0.375]"),
        *("-", "-"),
        *("2", "20", "0.312", "0.188", "-0.124", "[-0.250, -0.062]", "-0.374", "[-0.750, +0.000]"),
    ]
    # The last interval holds 0.
    assert [cell["class"] for cell in page.all("td") if "class" in cell] == ["better", "worse"]
    start = page.texts.index("untrained")
    assert page.texts[start : start + 9] == [
        *("untrained", "0.250", "0.500", "1", "0.375", "0.750", "2", "0.875", "0.250"),
    ]
    assert "Left out, because not every run scored them alike: ssim, hps." in page.texts


def test_page_describes_its_charts_by_their_figures(page: Any) -> None:
    assert page.after("Total against step", 1) == [
        f"Total against step. 1: a from 0.312 to 0.562; 2: {HOSTILE} from 0.312 to 0.188"
    ]
    assert page.after("lpips against ocr", 1) == [
        "lpips against ocr. untrained at 0.250, 0.500; 1: a at 0.375, 0.750; "
        f"2: {HOSTILE} at 0.875, 0.250, Pareto-optimal"
    ]
    assert "lpips (lower is better)" in page.texts
    # Of the three evaluations of the second run, and the one optimal run.
    assert [path["d"].count("L") for path in page.all("path") if path["class"] == "line"] == [1, 2]
    assert len([circle for circle in page.all("circle") if circle.get("class") == "front"]) == 1


def test_page_shows_the_prompts_on_which_runs_differ_most_first(tmp_path: Path, page: Any) -> None:
    shown = [text for text in page.texts if text.startswith("prompt ")]
    assert shown == ["prompt better", f"prompt {HOSTILE}", "prompt same"]
    # Means of the runs 0.5 and 0.25; the untrained model does not count.
    assert spread(make_prompt(tmp_path, "a", (9.0, 0.25, 0.5), (9.0, 0.75, 0.0))) == 0.25


def test_page_holds_every_score_against_that_of_the_first_run(page: Any) -> None:
    start = page.texts.index("total", page.texts.index("prompt better"))
    assert page.texts[start : start + 6] == [
        *("total", "0.250", "ocr", "0.125", "lpips", "does not apply"),
    ]
    assert page.texts[start + 6 : start + 13] == [
        *("1: a", "total", "0.500", "ocr", "0.250", "lpips", "does not apply"),
    ]
    assert page.texts[start + 13 : start + 20] == [
        *(f"2: {HOSTILE}", "total", "1.000", "+0.500", "ocr", "0.500", "+0.250"),
    ]


def test_page_shows_the_pictures_beside_it_and_says_which_is_missing(path: Path, page: Any) -> None:
    # Of one prompt with two samples.
    assert page.texts.count("Image missing") == 2
    for link in page.linked():
        assert (path.parent / str(link)).resolve().is_relative_to(path.parent.resolve())
        assert (path.parent / str(link)).is_file()
    assert page.alternatives()["pictures/better-1-1.webp"] == "1: a: prompt better"
    with Image.open(path.parent / "pictures/same-0-1.webp") as image:
        assert image.size == (384, 192)
    with Image.open(path.parent / "pictures/same-0-0.webp") as image:
        # Small pictures lose nothing.
        assert (image.size, image.convert("RGB").getpixel((3, 3))) == ((16, 8), (0, 128, 255))


def test_page_shows_what_users_wrote_as_text(path: Path, page: Any) -> None:
    assert page.all("script") == page.all("b") == []
    assert not [key for _, attributes in page.elements for key in attributes if key[:2] == "on"]
    assert f"data.path = {HOSTILE}" in page.texts
    # The name of the second run, and a text to be rendered.
    assert HOSTILE in page.texts
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<iframe", path.read_text())


def test_weights_of_terms_that_apply_to_no_prompt_are_named() -> None:
    _, totals, _ = comparison_tables(replace(COMPARISON, weights={"ocr": 0.5, "ssim": 0.2}))
    assert totals.title == "weights: ocr 0.5, ssim 0.2 (applies to no prompt)"
