from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from glm_grpo.compare.comparison import ComparedRun, Comparison, Gain, TradeOff
from glm_grpo.compare.page import comparison_tables, write_comparison

ReadPage = Callable[[Path], Any]
HOSTILE = "<script>alert(1)</script> $x^2$ {{ 7 * 7 }} & [red]"
FIRST = ComparedRun(
    name="a",
    settings={"reward.terms.ocr.weight": "0.3"},
    steps=(0, 20),
    totals=(0.3125, 0.5625),
    gain=Gain(0.25, 0.125, 0.375),
    over_first=None,
    terms={"ocr": 0.375, "lpips": 0.75},
)
SECOND = ComparedRun(
    name="b",
    settings={"reward.terms.ocr.weight": "0.6"},
    steps=(0, 10, 20),
    totals=(0.3125, 0.25, 0.1875),
    gain=Gain(-0.125, -0.25, -0.0625),
    over_first=Gain(-0.375, -0.75, 0.0),
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


def print_tables(comparison: Comparison) -> str:
    console = Console(width=120, file=io.StringIO())
    for table in comparison_tables(comparison):
        console.print(table)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(
        COMPARISON, tmp_path_factory.mktemp("compare") / "page", has_samples=False
    )


@pytest.fixture(scope="module")
def page(path: Path, read_page: ReadPage) -> Any:
    return read_page(path)


def test_labels_are_the_settings_where_all_of_them_are_short() -> None:
    assert COMPARISON.labels() == ("1: ocr.weight=0.3", "2: ocr.weight=0.6")
    # "data.path=" and 34 characters fit, one more does not; nor does a run without a difference.
    fits, too_long, nothing = (
        replace(COMPARISON, runs=(FIRST, replace(SECOND, settings=settings)))
        for settings in ({"data.path": "p" * 34}, {"data.path": "p" * 35}, {})
    )
    assert fits.labels() == ("1: ocr.weight=0.3", f"2: data.path={'p' * 34}")
    assert too_long.labels() == nothing.labels() == ("1: a", "2: b")


def test_page_shows_every_figure(page: Any) -> None:
    assert "ocr 0.5, lpips -0.5" in page.texts
    assert "reward.terms.ocr.weight = 0.6" in page.texts
    assert any("2 held-out prompts, 4 images each" in text for text in page.texts)
    # By the weights: run, last step, before, after, gain with interval, and that over run 1.
    start = page.texts.index("20") - 1
    assert page.texts[start : start + 14] == [
        *("1", "20", "0.312", "0.562", "+0.250", "+0.125 to +0.375"),
        *("2", "20", "0.312", "0.188", "-0.125", "-0.250 to -0.062", "-0.375", "-0.750 to +0.000"),
    ]
    start = page.texts.index("untrained")
    assert page.texts[start : start + 9] == [
        *("untrained", "0.250", "0.500", "1", "0.375", "0.750", "2", "0.875", "0.250"),
    ]
    assert "Left out, as not every run scored them alike: ssim, hps." in page.texts


def test_page_colours_gains_whose_interval_leaves_out_zero(page: Any) -> None:
    classes = [cell["class"] for cell in page.all("td") if "class" in cell]
    assert classes == ["better", "worse", ""]


def test_page_shows_and_describes_each_picture(path: Path, page: Any) -> None:
    assert page.alternatives() == {
        "curves.png": "Total against step. 1: ocr.weight=0.3 from 0.312 to 0.562; "
        "2: ocr.weight=0.6 from 0.312 to 0.188",
        "tradeoff-ocr-lpips.png": "lpips against ocr. untrained at 0.250, 0.500; "
        "1: ocr.weight=0.3 at 0.375, 0.750; 2: ocr.weight=0.6 at 0.875, 0.250, optimal",
    }
    for image, source in zip(page.all("img"), page.all("source"), strict=True):
        assert source["media"] == "(prefers-color-scheme: dark)"
        light, dark = (
            Image.open(path.parent / str(name)) for name in (image["src"], source["srcset"])
        )
        assert light.size == dark.size
        assert light.convert("L").getpixel((2, 2)) > 200 > 100 > dark.convert("L").getpixel((2, 2))


def test_page_speaks_of_no_trade_off_and_of_nothing_left_out_where_there_is_none(
    tmp_path: Path, read_page: ReadPage
) -> None:
    comparison = replace(COMPARISON, trade_offs=(), left_out=(), samples_per_prompt=1)
    page = read_page(write_comparison(comparison, tmp_path, has_samples=False))
    assert set(page.alternatives()) == {"curves.png"}
    text = " ".join(page.texts)
    assert "Trade-offs" not in text
    assert "Left out" not in text
    assert "2 held-out prompts, 1 image each" in text


def test_page_says_that_a_run_differs_in_nothing(tmp_path: Path, read_page: ReadPage) -> None:
    runs = tuple(replace(run, settings={}) for run in (FIRST, SECOND))
    page = read_page(write_comparison(replace(COMPARISON, runs=runs), tmp_path, has_samples=False))
    assert page.texts.count("nothing") == 2


def test_page_loads_nothing_but_the_files_beside_it(path: Path, page: Any) -> None:
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<iframe", path.read_text())
    assert page.linked() == {file.name for file in path.parent.glob("*.png")}


def test_page_and_tables_keep_hostile_text_as_text(tmp_path: Path, read_page: ReadPage) -> None:
    path = '<b>" onload=x [red].jsonl'
    hostile = replace(SECOND, name=HOSTILE, settings={"data.path": path})
    comparison = replace(COMPARISON, runs=(FIRST, hostile))
    page = read_page(write_comparison(comparison, tmp_path, has_samples=False))
    assert page.all("script") == page.all("b") == []
    assert not [key for _, attributes in page.elements for key in attributes if key[:2] == "on"]
    assert HOSTILE in page.texts
    assert f"data.path = {path}" in page.texts
    text = print_tables(comparison)
    assert "onload=x [red].jsonl" in text
    assert "[red]" in text.replace(path, "")


def test_page_takes_a_folder_whose_name_is_no_utf8(tmp_path: Path, read_page: ReadPage) -> None:
    runs = (FIRST, replace(SECOND, name="lone \udcff"))
    page = read_page(write_comparison(replace(COMPARISON, runs=runs), tmp_path, has_samples=False))
    assert "lone ?" in page.texts


def test_weights_say_which_terms_apply_to_no_prompt(tmp_path: Path, read_page: ReadPage) -> None:
    comparison = replace(COMPARISON, weights={"ocr": 0.5, "ssim": 0.2})
    said = "ocr 0.5, ssim 0.2 (applies to no prompt)"
    assert f"weights: {said}" in " ".join(print_tables(comparison).split())
    assert said in read_page(write_comparison(comparison, tmp_path, has_samples=False)).texts


def test_tables_say_what_was_found() -> None:
    # Without the breaks of captions.
    text = " ".join(print_tables(COMPARISON).split())
    for words in (
        "reward.terms.ocr.weight",
        "weights: ocr 0.5, lpips -0.5",
        "2 held-out prompts, 4 images each",
        "[+0.125, +0.375]",
        "[-0.750, +0.000]",
        "untrained",
        "0.875",
        "left out, as not every run scored them alike: ssim, hps",
    ):
        assert words in text, words
