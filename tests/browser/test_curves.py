"""The Curves view of the gallery."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

from glm_grpo.gallery import write_gallery
from glm_grpo.run.folder import RunFolder
from rewards.audit.canaries import Band, find_departures
from tests.browser.conftest import OpenGallery, wait_until_loaded

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


def point_at(page: Page, title: str, step: float) -> None:
    page.mouse.move(*place_of(page, title, step))


def expect_fragment(page: Page, fragment: str) -> None:
    expect(page).to_have_url(re.compile(re.escape(fragment) + "$"))


def test_every_value_is_that_of_the_metrics_file(open_curves: OpenGallery) -> None:
    page = open_curves()
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
    shown: dict[int, dict[str, float | None]] = {}
    for table in tables:
        for step, *values in table["rows"]:
            for name, value in zip(table["names"][1:], values, strict=True):
                if value != "" or name in {"policy/entropy", "custom/empty"}:
                    shown.setdefault(int(step), {})[name] = float(value) if value else None
    # An empty cell of a metric that the step does not have tells nothing.
    expected = {row["step"]: {k: v for k, v in row.items() if k != "step"} for row in ROWS}
    assert shown == expected


def test_charts_stand_under_the_question_they_answer(open_curves: OpenGallery) -> None:
    page = open_curves()
    expect(page.locator("details.question")).to_have_count(7)
    shown = {
        question.locator("h3").inner_text(): question.locator("h4").all_inner_texts()
        for question in page.locator("details.question").all()
    }
    assert shown == {
        "Does the reward rise?": ["Total", "ocr", "Texts read without a mistake, as a fraction"],
        "What does the policy learn from?": [
            "Share of the advantage, by term",
            "Correlation between terms, inside groups",
        ],
        "How far has the policy moved?": ["Entropy of the policy"],
        "Are the updates sound?": ["Replay gap"],
        "Does the policy game its reward?": ["Canaries outside their band", "Edge density"],
        "Where do time and memory go?": ["Most memory in use"],
        "Other": ["custom/figure", "custom/empty"],
    }
    expect(chart(page, "custom/empty")).to_contain_text("No finite value at any step")


def test_legend_shows_the_last_values_and_those_under_the_pointer(open_curves: OpenGallery) -> None:
    page = open_curves()
    expect_legend(page, "Total", ["reward/mean 0.8125 ± 0.5000", "eval/total 0.75"])
    point_at(page, "Total", 2.2)
    expect_legend(page, "Total", ["reward/mean 0.6250 ± 0.2500", "eval/total none at this step"])
    # All charts show the same step.
    expect_legend(page, "Entropy of the policy", ["policy/entropy not finite"])
    expect(page.locator(".step-bar strong")).to_have_text("Step 2")
    point_at(page, "Total", 6.4)
    expect_legend(page, "Total", ["reward/mean none at this step", "eval/total 0.5"])


def test_figures_have_their_unit(open_curves: OpenGallery) -> None:
    page = open_curves()
    expect_legend(page, "Most memory in use", ["memory/peak_bytes 3.419 GB"])
    expect_legend(page, "Replay gap", ["policy/replay_gap 3.633e\N{MINUS SIGN}8"])
    expect_legend(
        page,
        "Correlation between terms, inside groups",
        ["correlation/lpips/ocr \N{MINUS SIGN}0.375"],
    )


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (0.98212, 0.029621, "0.9821 ± 0.0296"),
        (-0.01, 0.3, "\N{MINUS SIGN}0.0100 ± 0.3000"),
        (1, 0.05, "1.000 ± 0.050"),
        (12345.6, 1.25, "12346 ± 1"),
        (0, 0, "0 ± 0"),
        (2e-5, 1e-6, "2e\N{MINUS SIGN}5 ± 1e\N{MINUS SIGN}6"),
    ],
)
def test_a_mean_and_its_spread_have_the_same_digits(
    open_gallery: OpenGallery, mean: float, std: float, text: str
) -> None:
    call = "([mean, std]) => glmGallery.curveMetrics.figureWithSpread(mean, std)"
    assert open_gallery().evaluate(call, [mean, std]) == text


def test_a_click_leads_to_the_images_of_the_step(open_curves: OpenGallery) -> None:
    page = open_curves()
    page.mouse.click(*place_of(page, "Total", 2))
    expect(page.get_by_role("heading", level=2)).to_have_text("Groups")
    expect_fragment(page, "#groups?step=2")
    page.go_back()
    expect(page.locator(".step-bar strong")).to_have_text("Step 2")
    expect_fragment(page, "#curves?step=2")


def test_a_click_on_an_evaluation_leads_to_the_held_out_images(open_curves: OpenGallery) -> None:
    page = open_curves()
    page.mouse.click(*place_of(page, "Texts read without a mistake, as a fraction", 6))
    expect(page.get_by_role("heading", level=2)).to_have_text("Progress")
    expect_fragment(page, "#progress?prompt=plain&step=6&sample=0")


def test_a_finger_moves_the_cursor_and_stays_on_the_page(open_curves: OpenGallery) -> None:
    page = open_curves(has_touch=True, viewport={"width": 390, "height": 800})
    page.touchscreen.tap(*place_of(page, "Total", 12))
    expect(page.locator(".step-bar strong")).to_have_text("Step 12")
    expect(page).to_have_url(re.compile("#curves"))
    page.get_by_role("link", name="Held-out pictures").tap()
    expect(page.get_by_role("heading", level=2)).to_have_text("Progress")


def test_keys_move_the_cursor_along_the_values_of_a_chart(open_curves: OpenGallery) -> None:
    page = open_curves()
    total, entropy = slider(page, "Total"), slider(page, "Entropy of the policy")
    text = "last values: reward/mean 0.8125 ± 0.5000, eval/total 0.75"
    expect(total).to_have_attribute("aria-valuetext", text)
    total.press("Home")
    text = "step 0: reward/mean none at this step, eval/total 0.25"
    expect(total).to_have_attribute("aria-valuetext", text)
    for key, step in {
        "ArrowRight": 1,
        "ArrowUp": 2,
        "ArrowDown": 1,
        "End": LAST,
        "PageDown": 0,
    }.items():
        total.press(key)
        expect(total).to_have_attribute("aria-valuenow", str(step))
    # Steps 1, 3 and 12 have an entropy; the cursor comes from a step between or beside them.
    total.press("PageUp")
    for step in (12, 3, 1):
        entropy.press("ArrowLeft")
        expect(entropy).to_have_attribute("aria-valuenow", str(step))
    total.press("ArrowRight")
    entropy.press("ArrowRight")
    expect(entropy).to_have_attribute("aria-valuenow", "3")
    entropy.press("ArrowLeft")
    entropy.press("Enter")
    expect(page.get_by_role("heading", level=2)).to_have_text("Groups")
    expect_fragment(page, "#groups?step=1")


def test_escape_takes_the_cursor_away(open_curves: OpenGallery) -> None:
    page = open_curves("step=3")
    expect(page.locator(".step-bar strong")).to_have_text("Step 3")
    slider(page, "Total").press("Escape")
    expect(page.locator(".step-bar strong")).to_have_text(f"Last step {LAST}")
    page.wait_for_url(re.compile("#curves$"))


def test_enter_on_an_evaluation_leads_to_the_held_out_images(open_curves: OpenGallery) -> None:
    page = open_curves("step=6")
    slider(page, "Total").press("Enter")
    expect(page.get_by_role("heading", level=2)).to_have_text("Progress")


def test_each_chart_tells_its_course_in_words(open_curves: OpenGallery) -> None:
    page = open_curves()
    expect(slider(page, "Total")).to_have_accessible_description(
        "reward/mean: first 0.5 at step 1, last 0.8125 at step 13, lowest 0.5 at step 1, "
        "highest 0.875 at step 12. eval/total: first 0.25 at step 0, last 0.75 at step 12, "
        "lowest 0.25 at step 0, highest 0.75 at step 12."
    )


def test_state_is_in_the_address(open_curves: OpenGallery) -> None:
    page = open_curves()
    page.get_by_label("Metrics with").fill("reward/")
    page.get_by_label("Smoothing").fill("0.5")
    page.get_by_label("Steps from").fill("1")
    page.get_by_label("Steps from").press("Enter")
    page.get_by_role("button", name="Enlarge ocr").click()
    page.locator("summary").nth(1).click()
    page.wait_for_url(re.compile("closed=signal"))
    page.reload()
    wait_until_loaded(page)
    titles = ["Total", "ocr", "Share of the advantage, by term"]
    expect(page.locator("h4")).to_have_text(titles)
    expect(page.get_by_label("Smoothing")).to_have_value("0.5")
    expect(page.get_by_label("Steps from")).to_have_value("1")
    expect(page.get_by_role("button", name="Enlarge ocr")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("details.question").nth(1)).not_to_have_attribute("open", re.compile(".*"))
    page.get_by_role("button", name="Whole run").click()
    expect(page.get_by_label("Steps from")).to_have_value("0")


@pytest.mark.parametrize(
    "query", ["smooth=much&from=9&to=2&step=x&large=none&closed=none", "smooth=7"]
)
def test_an_address_that_makes_no_sense_shows_the_whole_run(
    query: str, open_curves: OpenGallery
) -> None:
    page = open_curves(query)
    expect(page.get_by_label("Smoothing")).to_have_value("0")
    expect(page.get_by_label("to", exact=True)).to_have_value(str(LAST))
    expect(page.locator("h4")).to_have_count(12)


def test_dragging_shows_a_range_of_steps(open_curves: OpenGallery) -> None:
    page = open_curves()
    page.mouse.move(*place_of(page, "Total", 1))
    page.mouse.down()
    page.mouse.move(*place_of(page, "Total", 6), steps=5)
    before = draw(page, "Total")
    page.mouse.up()
    page.wait_for_url(re.compile("from=1&to=6"))
    wait_for_drawing(page, "Total", other_than=before)
    # The view is the same: no click came of it.
    expect(page.get_by_role("heading", level=2)).to_have_text("Curves")
    # Two fifths of the width are now at 1 + 5 * 2 / 5 = 3; of all steps they lie nearest to 6.
    x, y = place_of(page, "Total", LAST * 2 / 5)
    page.mouse.move(x, y)
    expect(page.locator(".step-bar strong")).to_have_text("Step 3")


def test_no_metric_of_that_name_is_said(open_curves: OpenGallery) -> None:
    page = open_curves()
    page.get_by_label("Metrics with").fill("<b>nothing</b>")
    expect(page.get_by_text('No metric has "<b>nothing</b>" in its name.')).to_be_visible()
    expect(page.locator("p[role=status]")).to_have_text("0 charts")


def test_lines_of_a_chart_differ_without_their_colours(open_curves: OpenGallery) -> None:
    page = open_curves()
    lines = chart(page, "Share of the advantage, by term").locator(".legend line")
    expect(lines).to_have_count(2)
    dashes = [line.get_attribute("stroke-dasharray") for line in lines.all()]
    assert len(dashes) == len(set(dashes)) == 2


def test_smoothing_is_not_drawn_towards_zero(open_curves: OpenGallery) -> None:
    page = open_curves()
    smooth = "([values, weight]) => glmGallery.curveMetrics.smooth(values, weight)"
    # Weights 1/2 of the past: (1/4 * 1 + 1/2 * 3) / (3/4) = 7/3.
    assert page.evaluate(smooth, [[1, 3], 0.5]) == pytest.approx([1, 7 / 3])
    assert page.evaluate(smooth, [[1, None, 3], 0.5]) == pytest.approx([1, None, 7 / 3])
    assert page.evaluate(smooth, [[1, 3, 2], 0]) == [1, 3, 2]


def test_smoothing_changes_the_drawing_and_not_the_figures(open_curves: OpenGallery) -> None:
    page = open_curves()
    before = draw(page, "Total")
    page.get_by_label("Smoothing").fill("0.9")
    expect(page.get_by_text("Figures stay as they were recorded")).to_be_visible()
    wait_for_drawing(page, "Total", other_than=before)
    expect_legend(page, "Total", ["reward/mean 0.8125 ± 0.5000", "eval/total 0.75"])


def test_values_that_are_not_finite_are_bridged_by_a_dotted_line(open_curves: OpenGallery) -> None:
    page = open_curves()
    lay_out = """values => {
        const line = { values, style: { colour: "--ink", dash: [] } };
        const chart = { lines: [line], evaluations: [], band: null };
        const { series, columns } = glmGallery.curveLayout.layOut([1, 2, 3], chart, 0);
        return series.map(({ dash, spanGaps }, at) => spanGaps ? [dash, columns[at]] : null)
            .filter(Boolean);
    }"""
    ((dash, column),) = page.evaluate(lay_out, [1, None, 3])
    assert len(dash) == 2
    assert column == [1, None, 3]
    assert page.evaluate(lay_out, [None, 2, 3]) == page.evaluate(lay_out, [1, 2, 3]) == []


def test_band_of_a_mean_is_one_standard_deviation_to_either_side(open_curves: OpenGallery) -> None:
    page = open_curves()
    lay_out = """smoothing => {
        const line = { values: [1, 3], std: [0.5, 0.25], style: { colour: "--ink", dash: [] } };
        const chart = { lines: [line], evaluations: [], band: null };
        const { bands, columns } = glmGallery.curveLayout.layOut([1, 2], chart, smoothing);
        return bands[0].series.map(at => columns[at]);
    }"""
    assert page.evaluate(lay_out, 0) == [[1.5, 3.25], [0.5, 2.75]]
    # Smoothed as the mean is, which becomes 7/3; the deviation 1/3.
    high, low = page.evaluate(lay_out, 0.5)
    assert (high, low) == (pytest.approx([1.5, 8 / 3]), pytest.approx([0.5, 2]))


@pytest.mark.parametrize("prompts", [1, 4, 100])
def test_band_of_a_canary_is_that_of_the_run(prompts: int, open_curves: OpenGallery) -> None:
    page = open_curves()
    band = page.evaluate(
        "([band, count]) => glmGallery.curveMetrics.canaryBand('a_term', band, 6, [count])",
        [asdict(BAND), prompts],
    )
    half_width = BAND.half_width(prompts, 6.0)
    assert band["low"] == pytest.approx([0.5 - half_width], abs=1e-12)
    assert band["high"] == pytest.approx([0.5 + half_width], abs=1e-12)
    varied = {**asdict(BAND), "collapse_below": 0.05}
    found = page.evaluate(
        "band => glmGallery.curveMetrics.canaryBand('a_term', band, 60, [4])", varied
    )
    assert found["low"] == [Band(**varied).limits(4, 60.0)[0]] == [0.05]
    tight = {**asdict(BAND), "std": 0.0}
    found = page.evaluate(
        "band => glmGallery.curveMetrics.canaryBand('a_term', band, 6, [0, 4])", tight
    )
    assert found["low"][0] is None
    assert found["low"][1] == pytest.approx(0.5 - Band(0.5, 0.0, 16).half_width(4, 6.0), abs=1e-12)


def test_band_of_evaluations_is_over_their_prompts_and_open_above(
    open_curves: OpenGallery,
) -> None:
    band = replace(BAND, is_of_evaluations=True)
    low = BAND.half_width(16, 6.0)
    judged = open_curves().evaluate(
        """band => {
          glmGallery.run.bands = {term: band};
          const { judgeCanary } = glmGallery.imageTable;
          const judge = (value) => judgeCanary("term", {"canary/term": value}, [{raw: {}}]);
          return [0.7, 0.2, 0.99].map(judge);
        }""",
        asdict(band),
    )
    assert [each["isInside"] for each in judged] == [True, False, True]
    assert judged[0]["low"] == pytest.approx(0.5 - low)
    assert judged[0]["high"] is None
    values = torch.full((16,), 0.2)
    assert len(find_departures({"term": band}, {"term": values}, 6.0)) == 1


@pytest.mark.parametrize(
    ("name", "low", "high"),
    # 0.5 -+ 60 * 0.125 * sqrt(1/4 + 1/16)
    [("edge_density", 0, 1), ("colour_entropy", 0, 4.693), ("a_term", -3.693, 4.693)],
)
def test_band_of_a_canary_ends_where_its_values_do(
    name: str, low: float, high: float, open_curves: OpenGallery
) -> None:
    found = open_curves().evaluate(
        "([name, band]) => glmGallery.curveMetrics.canaryBand(name, band, 60, [4])",
        [name, asdict(BAND)],
    )
    assert (found["low"], found["high"]) == (
        [pytest.approx(low, abs=1e-3)],
        [pytest.approx(high, abs=1e-3)],
    )


def test_canary_outside_its_band_is_said(open_curves: OpenGallery) -> None:
    page = open_curves("step=1")
    # 6 * 0.125 * sqrt(1/4 + 1/16) = 0.419: four prompts a step. 0.9 lies inside, barely.
    inside = "canary/edge_density 0.5, in the band 0.08074 to 0.9193"
    expect(chart(page, "Edge density").locator(".legend li")).to_have_text(inside)
    values = {"edge_density": torch.full((4,), 0.9)}
    assert find_departures({"edge_density": BAND}, values, 6.0) == ()
    # Half as wide with a margin of three.
    page.evaluate("glmGallery.run.canary_margin = 3")
    page.evaluate("glmGallery.go('find')")
    page.evaluate("glmGallery.go('curves', {step: 13})")
    outside = "canary/edge_density 0.9, outside the band 0.2904 to 0.7096"
    expect(chart(page, "Edge density").locator(".legend li")).to_have_text(outside)
    assert len(find_departures({"edge_density": BAND}, values, 3.0)) == 1


def test_drawings_follow_the_colours_of_the_system(open_curves: OpenGallery) -> None:
    page = open_curves(color_scheme="light")
    light = draw(page, "Total")
    page.emulate_media(color_scheme="dark")
    wait_for_drawing(page, "Total", other_than=light)
    page.emulate_media(color_scheme="light")
    wait_for_drawing(page, "Total", like=light)


def draw(page: Page, title: str) -> str:
    drawing: str = chart(page, title).locator("canvas").evaluate("canvas => canvas.toDataURL()")
    return drawing


def wait_for_drawing(
    page: Page, title: str, *, like: str | None = None, other_than: str | None = None
) -> None:
    """Until a chart is drawn as `like`, or in any way other than `other_than`."""
    page.wait_for_function(
        """([title, like, otherThan]) => {
            const charts = [...document.querySelectorAll("figure.chart")];
            const chart = charts.find(each => each.querySelector("h4").textContent === title);
            const drawing = chart.querySelector("canvas")?.toDataURL();
            return drawing && drawing !== otherThan && (like === null || drawing === like);
        }""",
        arg=[title, like, other_than],
    )


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_are_accessible(
    scheme: str,
    width: int,
    open_curves: OpenGallery,
    find_violations: Callable[[Page], list[str]],
) -> None:
    query = "step=12&smooth=0.5&large=reward%2Focr%2Fmean"
    viewport = {"width": width, "height": 800}
    # axe asks for the styles again, which the page's policy refuses.
    page = open_curves(
        query, color_scheme=scheme, viewport=viewport, allows="Content Security Policy"
    )
    page.get_by_role("button", name="Values of Total").click()
    expect(page.get_by_role("region", name="Values of Total")).to_be_visible()
    expect(page.locator(".step-bar strong")).to_have_text("Step 12")
    assert find_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


# The lowest and the highest value, and the labels of the axis beside them.
NARROW: dict[str, tuple[list[float | None], list[str]]] = {
    # The mean ratio of a step on policy: what is beside 1 is the rounding of 32-bit numbers.
    "rounding": ([1.00000002, 1.00000007], ["0.9", "0.95", "1", "1.05", "1.1"]),
    "negative": ([-1.00000007, -1.00000002], ["-1.1", "-1.05", "-1", "-0.95"]),
    "flat limit": ([1.0, 1.000001], ["0.9", "0.95", "1", "1.05", "1.1"]),
    # Ends that differ in their seventh digit, which uPlot's own range rounds to one number.
    "barely wider": ([0.99999945, 1.00000055], ["1", "1.0000005"]),
    "wider": ([1.0, 1.00001], ["1", "1.0000025", "1.000005", "1.0000075", "1.00001"]),
    "equal": ([0.25, 0.25], ["0.24", "0.26"]),
    "zero": ([0.0, 0.0], ["0", "0.25", "0.5", "0.75", "1"]),
    "one point": ([0.5, None], ["0.45", "0.475", "0.5", "0.525", "0.55"]),
    "denormal": ([5e-324, 1e-300], ["0", "0.25", "0.5", "0.75", "1"]),
    "small": ([1e-13, 2e-13], ["1e-13", "1.5e-13", "2e-13"]),
    "exploded": ([0.0, 1e38], ["0", "2.5e37", "5e37", "7.5e37", "1e38"]),
    "both signs": ([-1.7e308, 1.7e308], ["-1e300", "0", "1e300"]),
}


@pytest.mark.parametrize("smoothing", [0, 0.9])
def test_every_range_of_values_is_drawn(
    smoothing: float, open_gallery: OpenGallery, empty_run: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(empty_run.path, folder.path)
    names = {f"narrow/{name}": values for name, (values, _) in NARROW.items()}
    rows = [
        {"step": step, "narrow/none": None}
        | {name: values[step - 1] for name, values in names.items()}
        for step in (1, 2)
    ]
    folder.metrics_path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_gallery(folder, ())
    page = open_gallery(f"curves?smooth={smoothing}", run=folder)
    for title in names:
        chart(page, title).scroll_into_view_if_needed()
        wait_for_drawing(page, title, other_than="")
    expect(chart(page, "narrow/none")).to_contain_text("No finite value at any step")


@pytest.mark.parametrize("name", NARROW)
def test_axis_tells_every_range_of_values_apart(open_curves: OpenGallery, name: str) -> None:
    values, labels = NARROW[name]
    shown = open_curves().evaluate(
        """(values) => {
            const { axes, yRange } = glmGallery.curveLayout;
            const known = values.filter((value) => value !== null);
            const place = document.body.appendChild(document.createElement("div"));
            const scales = { x: { time: false }, y: { range: yRange } };
            const series = [{}, { stroke: "red" }];
            const options = { width: 400, height: 170, scales, axes: axes(""), series };
            const plot = new uPlot(options, [[1, 2], values], place);
            return new Promise((done) => queueMicrotask(() => {
                const { min, max } = plot.scales.y;
                const isWithin = known.every(
                    (value) => Math.abs(value) > 1e300 || (min <= value && value <= max),
                );
                done({ isWithin, labels: plot.axes[1]._values });
            }));
        }""",
        values,
    )
    minus = "\N{MINUS SIGN}"
    assert shown == {"isWithin": True, "labels": [label.replace("-", minus) for label in labels]}


def test_run_without_metrics_says_so(open_gallery: OpenGallery, empty_run: RunFolder) -> None:
    page = open_gallery("curves", run=empty_run)
    expect(page.get_by_text("No metrics are recorded yet.")).to_be_visible()


def test_run_of_one_step_is_drawn(
    open_gallery: OpenGallery, gallery_run: RunFolder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("one") / "run")
    folder.path.mkdir()
    shutil.copy(gallery_run.config_path, folder.config_path)
    folder.metrics_path.write_text('{"step": 1, "reward/mean": 0.5}\n')
    write_gallery(folder, ())
    page = open_gallery("curves", run=folder)
    text = "last values: reward/mean 0.5"
    expect(slider(page, "Total")).to_have_attribute("aria-valuetext", text)
    assert not math.isnan(float(chart(page, "Total").locator("canvas").evaluate("c => c.width")))


def test_a_band_that_is_open_above_marks_falls_alone(open_curves: OpenGallery) -> None:
    page = open_curves("")
    marked = """(isOpenAbove) => {
      const chart = {
        lines: [{ values: [0.1, 0.5, 0.9], style: { colour: "--ink" } }],
        evaluations: [],
        band: { low: [0.3, 0.3, 0.3], high: [0.6, 0.6, 0.6], isOpenAbove },
      };
      return glmGallery.curveLayout.layOut([0, 1, 2], chart, 0).columns.at(-1);
    }"""
    assert page.evaluate(marked, False) == [0.1, None, 0.9]
    assert page.evaluate(marked, True) == [0.1, None, None]
