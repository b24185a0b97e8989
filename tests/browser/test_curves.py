"""The Curves view of the gallery."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from glm_grpo.run.folder import RunFolder
from glm_grpo.studio.gallery import write_gallery
from rewards.canaries import Band
from tests.browser.conftest import OpenGallery, copy_run, show, wait_until_loaded

METRICS = Path(__file__).resolve().parents[2] / "docs/reference/metrics.md"
LAST = 13
# Steps 12 and 13 of the run have tables, step 6 has an evaluation and no rollout.
ROWS: list[dict[str, int | float | None]] = [
    {"step": 0, "eval/total": 0.25, "eval/ocr": 0.5, "eval/ocr_exact": 0.125},
    {
        "step": 1,
        "reward/mean": 0.5,
        "reward/std": 0.125,
        "reward/ocr/mean": 0.1 + 0.2,
        "reward/ocr/std": 0.25,
        "reward/ocr/advantage_share": 0.75,
        "reward/lpips/advantage_share": 0.25,
        "correlation/lpips/ocr": -0.375,
        "policy/entropy": 0.5,
        "policy/replay_gap": 3.633211065334763e-08,
        "memory/peak_bytes": 3419377664.0,
        "canary/edge_density": 0.5,
        "canary/departures": 0.0,
        "custom/figure": 7.0,
        "custom/empty": None,
    },
    {"step": 2, "reward/mean": 0.625, "reward/std": 0.25, "policy/entropy": None},
    {"step": 3, "reward/mean": 0.75, "reward/std": 0.25, "policy/entropy": 0.25},
    {"step": 6, "eval/total": 0.5, "eval/ocr": 0.75, "eval/ocr_exact": 0.25},
    {
        "step": 12,
        "reward/mean": 0.875,
        "reward/std": 0.5,
        "eval/total": 0.75,
        "eval/ocr": 1.0,
        "policy/entropy": 0.375,
    },
    {"step": LAST, "reward/mean": 0.8125, "reward/std": 0.5, "canary/edge_density": 0.9},
]
BAND = Band(mean=0.5, std=0.125, prompts=16)


@pytest.fixture(scope="module")
def run(gallery_run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The common run with metrics and a band of its own."""
    folder = RunFolder(tmp_path_factory.mktemp("curves") / "run")
    shutil.copytree(gallery_run.path, folder.path)
    folder.metrics_path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    folder.canaries_path.write_text(json.dumps({"edge_density": asdict(BAND)}))
    write_gallery(folder, ())
    return folder


@pytest.fixture
def open_curves(open_gallery: OpenGallery, run: RunFolder) -> OpenGallery:
    """Opens the curves, with what follows `?` in the address."""

    def open_page(query: str = "", **options: Any) -> Page:
        page = open_gallery(f"curves?{query}", run=run, **options)
        page.wait_for_selector(".plot canvas")
        return page

    return open_page


def chart(page: Page, title: str) -> Locator:
    heading = page.get_by_role("heading", level=4, name=title, exact=True)
    return page.locator("figure.chart").filter(has=heading)


def slider(page: Page, title: str) -> Locator:
    return page.get_by_role("slider", name=title, exact=True)


def expect_legend(page: Page, title: str, texts: list[str]) -> None:
    entries = chart(page, title).locator(".legend li")
    expect(entries).to_have_text(texts, use_inner_text=True)


def place_of(page: Page, title: str, step: float) -> tuple[float, float]:
    """Where a step lies in the drawing of a chart, half way up."""
    chart(page, title).scroll_into_view_if_needed()
    box = chart(page, title).locator(".u-over").bounding_box()
    assert box is not None
    return box["x"] + box["width"] * step / LAST, box["y"] + box["height"] / 2


def expect_fragment(page: Page, fragment: str) -> None:
    expect(page).to_have_url(re.compile(re.escape(fragment) + "$"))


def test_charts_stand_under_questions_and_show_every_value(open_curves: OpenGallery) -> None:
    page = open_curves()
    expect(page.locator("details.question")).to_have_count(7)
    shown = {
        question.locator("h3").inner_text(): question.locator("h4").all_inner_texts()
        for question in page.locator("details.question").all()
    }
    assert shown["Does the reward rise?"] == [
        *("Total", "ocr", "Texts read without a mistake, as a fraction")
    ]
    assert shown["Other"] == ["custom/figure", "custom/empty"]
    expect(chart(page, "custom/empty")).to_contain_text("No finite value at any step")
    expect(slider(page, "Total")).to_have_accessible_description(
        "reward/mean: first 0.5000 at step 1, last 0.8125 at step 13, lowest 0.5000 at step 1, "
        "highest 0.8750 at step 12. eval/total: first 0.2500 at step 0, last 0.7500 at step 12, "
        "lowest 0.2500 at step 0, highest 0.7500 at step 12."
    )
    expect_legend(page, "Total", ["reward/mean 0.8125", "eval/total 0.7500"])
    page.mouse.move(*place_of(page, "Total", 2.2))
    # Of the twelve totals of the step, rising: 0, twice 0.25, five times 0.375, twice 0.5, 0.625,
    # 0.75. A tenth lies below the 1.1th, 0.25, a tenth above the 9.9th, 0.5 + 0.9 * 0.125.
    band = "0.2500 to 0.6125"
    expect_legend(page, "Total", [f"reward/mean 0.6250 ({band})", "eval/total none at this step"])
    # All charts show the same step.
    expect_legend(page, "Entropy of the policy", ["policy/entropy not finite"])

    buttons = page.get_by_role("button", name="Values of")
    expect(buttons).to_have_count(12)
    for button in buttons.all():
        button.click()
    expect(page.locator(".values table")).to_have_count(12)
    tables = page.locator(".values table").evaluate_all(
        """tables => tables.map(table => ({
            names: [...table.querySelectorAll("thead th")].map(cell => cell.textContent),
            rows: [...table.querySelectorAll("tbody tr")].map(row => [...row.children].map(
                cell => (cell.querySelector("data") || {}).value ?? cell.textContent)),
        }))"""
    )
    values_of: dict[int, dict[str, float | None]] = {}
    for table in tables:
        for step, *values in table["rows"]:
            for name, value in zip(table["names"][1:], values, strict=True):
                if value != "" or name in {"policy/entropy", "custom/empty"}:
                    values_of.setdefault(int(step), {})[name] = float(value) if value else None
    # An empty cell of a metric that the step does not have tells nothing.
    assert values_of == {
        row["step"]: {name: value for name, value in row.items() if name != "step"} for row in ROWS
    }


def test_every_documented_metric_stands_under_a_question(open_curves: OpenGallery) -> None:
    rows = re.findall(r"^\| `([^`]+)`", METRICS.read_text(encoding="utf-8"), re.MULTILINE)
    names = [row.replace("<name>", "ocr").replace("<other>", "lpips") for row in rows]
    assert "reward/ocr/std_within" in names
    questions = open_curves().evaluate(
        "names => glmGallery.curveMetrics.arrange(names, ['ocr', 'lpips'])", names
    )
    other = [question["charts"] for question in questions if question["key"] == "other"]
    assert other == []


def test_charts_are_gone_through_by_keys_and_pointer_and_keep_their_state(
    open_curves: OpenGallery,
) -> None:
    page = open_curves()
    total, entropy = slider(page, "Total"), slider(page, "Entropy of the policy")
    total.press("Home")
    text = "step 0: reward/mean none at this step, eval/total 0.2500"
    expect(total).to_have_attribute("aria-valuetext", text)
    for key, step in (("ArrowRight", 1), ("End", LAST), ("PageDown", 0), ("PageUp", LAST)):
        total.press(key)
        expect(total).to_have_attribute("aria-valuenow", str(step))
    # Steps 1, 3 and 12 have an entropy; the cursor comes from a step beside them.
    for step in (12, 3, 1):
        entropy.press("ArrowLeft")
        expect(entropy).to_have_attribute("aria-valuenow", str(step))
    entropy.press("Enter")
    expect_fragment(page, "#groups?step=1")

    show(page, "curves")
    page.wait_for_selector(".plot canvas")
    page.mouse.click(*place_of(page, "Total", 2))
    expect_fragment(page, "#groups?step=2")
    page.go_back()
    expect(page.locator(".step-bar strong")).to_have_text("Step 2")
    page.mouse.click(*place_of(page, "Texts read without a mistake, as a fraction", 6))
    expect_fragment(page, "#progress?prompt=plain&step=6&sample=0")

    show(page, "curves")
    page.wait_for_selector(".plot canvas")
    page.get_by_role("searchbox", name="Metric").fill("reward/")
    page.get_by_label("Smoothing").fill("0.5")
    page.get_by_label("Steps from").fill("1")
    # What is typed outlives a new drawing of the view.
    page.evaluate("glmGallery.replace('curves', glmGallery.route().params)")
    page.evaluate("() => new Promise(requestAnimationFrame)")
    page.get_by_label("Steps from").press("Enter")
    page.get_by_role("button", name="Enlarge ocr").click()
    page.wait_for_url(re.compile("large="))
    page.reload()
    wait_until_loaded(page)
    titles = ["Total", "ocr", "Share of the advantage, by term"]
    expect(page.locator("h4")).to_have_text(titles)
    expect(page.get_by_label("Smoothing")).to_have_value("0.5")
    expect(page.get_by_label("Steps from")).to_have_value("1")
    expect(page.get_by_role("button", name="Enlarge ocr")).to_have_attribute("aria-pressed", "true")


def test_smoothing_and_bands_are_those_of_the_values_and_of_training(
    open_curves: OpenGallery,
) -> None:
    page = open_curves()
    smooth = "([values, weight]) => glmGallery.curveMetrics.smooth(values, weight)"
    # Weights 1/2 of the past: (1/4 * 1 + 1/2 * 3) / (3/4) = 7/3; not drawn towards zero.
    assert page.evaluate(smooth, [[1, None, 3], 0.5]) == pytest.approx([1, None, 7 / 3])
    call = "(values) => glmGallery.curveMetrics.canaryBand(...values)"
    for prompts in (1, 4, 100):
        found = page.evaluate(call, ["a_term", asdict(BAND), 6, [prompts]])
        low, high = BAND.limits(prompts, 6.0)
        assert found["low"] == [pytest.approx(low, abs=1e-12)]
        assert found["high"] == [pytest.approx(high, abs=1e-12)]
    varied = replace(BAND, collapse_below=0.05)
    found = page.evaluate(call, ["a_term", asdict(varied), 60, [4]])
    assert found["low"] == [varied.limits(4, 60.0)[0]] == [0.05]
    # It ends where values do; 0.5 +- 60 * 0.125 * sqrt(1/4 + 1/16) otherwise.
    found = page.evaluate(call, ["edge_density", asdict(BAND), 60, [4]])
    assert (found["low"], found["high"]) == ([0], [1])


@pytest.mark.parametrize(
    ("low", "high", "least", "most"),
    [
        # At least 2 % of the largest value, around the middle.
        (1.0005, 1.001, 0.99074, 1.01076),
        (-1.001, -1.0005, -1.01076, -0.99074),
        # A change of 2.5 % fills the axis, with a tenth of it, rounded up, on either side.
        (0.975, 1.0, 0.972, 1.003),
        (1.0, 1.0, 0.9, 1.1),
        (0.0, 0.0, 0.0, 1.0),
    ],
)
def test_an_axis_does_not_magnify_small_changes(
    open_gallery: OpenGallery, run: RunFolder, low: float, high: float, least: float, most: float
) -> None:
    page = open_gallery("curves", run=run)
    ends = page.evaluate(f"glmGallery.curveLayout.yRange(null, {low}, {high})")
    assert ends == pytest.approx([least, most], abs=1e-6)


def test_terms_that_apply_to_no_prompt_have_no_charts(
    open_gallery: OpenGallery, gallery_run: RunFolder, tmp_path: Path
) -> None:
    run = copy_run(gallery_run, tmp_path / "run")
    unused = {"reward/lpips/mean": None, "reward/lpips/advantage_share": 0.0, "eval/lpips": None}
    rows = [row | unused | {"correlation/lpips/ocr": None} for row in ROWS]
    run.metrics_path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_gallery(run, ())
    page = open_gallery("curves", run=run)
    page.wait_for_selector(".plot canvas")
    expect(page.get_by_role("heading", level=4, name="ocr", exact=True)).to_have_count(1)
    expect(page.get_by_role("heading", level=4, name="lpips", exact=True)).to_have_count(0)
    expect(page.get_by_text("Correlation between terms")).to_have_count(0)
    expect(page.get_by_text("they apply to no prompt: lpips.")).to_be_visible()
    expect_legend(page, "Share of the advantage, by term", ["reward/ocr/advantage_share 0.7500"])
