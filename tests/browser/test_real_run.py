"""Every view on the folder of a real run, whose figures no one would make up."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from glm_grpo.run.folder import RunFolder
from glm_grpo.tiny.world import draw_sign, signs_of_words
from tests.browser.conftest import OpenGallery

LONGEST_TASK = 3000
"""Milliseconds in which the page answers to nothing. On a busy core a view takes less than a tenth
of that."""


def expect_no_freeze(page: Page) -> None:
    """No task of the page took long since it was opened."""
    durations = page.evaluate(
        """() => new Promise((done) => {
            new PerformanceObserver((list) => done(list.getEntries().map((task) => task.duration)))
              .observe({ type: "longtask", buffered: true });
            setTimeout(() => done([]), 500);
        })"""
    )
    assert max(durations, default=0) < LONGEST_TASK


def expect_whole_pictures(page: Page) -> None:
    """Every picture of the page is there once it is looked at, and holds pixels."""
    pictures = page.locator("img")
    expect(pictures.first).to_be_attached()
    for picture in pictures.all():
        picture.scroll_into_view_if_needed()
        expect(picture).not_to_have_js_property("naturalWidth", 0)


@pytest.mark.parametrize(
    ("fragment", "heading", "pictures"),
    [
        ("progress?samples=all&diff=1", "Progress", ".cell"),
        ("groups?step=1", "Groups", ".sample"),
        ("groups?step=3&diff=1", "Groups", ".sample"),
        ("weights", "Weights", ".weights-group"),
        ("weights?combine=normalize_then_sum", "Weights", ".weights-group"),
        ("find", "Find", "tbody tr"),
        ("find?of=evaluations", "Find", "tbody tr"),
        ("film", "Film", ".strip li"),
    ],
)
def test_views_show_the_pictures_of_a_real_run(
    open_gallery: OpenGallery, real_run: RunFolder, fragment: str, heading: str, pictures: str
) -> None:
    page = open_gallery(fragment, run=real_run)
    expect(page.get_by_role("heading", level=2)).to_have_text(heading)
    expect(page.locator(pictures).first).to_be_visible()
    expect_whole_pictures(page)
    expect(page.locator(".problem")).to_have_count(0)
    expect_no_freeze(page)


def test_large_view_shows_the_pictures_of_a_real_run(
    open_gallery: OpenGallery, real_run: RunFolder
) -> None:
    page = open_gallery("groups?step=1", run=real_run)
    page.locator(".sample .picture").first.click()
    for layout in ("o", "s", "w", "d"):
        page.keyboard.press(layout)
        pictures = page.get_by_role("dialog").locator("img")
        # The sample and its target.
        expect(pictures).to_have_count(2)
        for picture in pictures.all():
            expect(picture).not_to_have_js_property("naturalWidth", 0)
    expect_no_freeze(page)


def test_report_shows_the_pictures_of_a_real_run(
    open_gallery: OpenGallery, real_run: RunFolder
) -> None:
    page = open_gallery(run=real_run)
    page.get_by_role("navigation").get_by_role("link", name="Before and after").click()
    page.wait_for_url("**/gallery/report.html")
    expect(page.get_by_role("heading", name="Best, median and worst")).to_be_visible()
    expect_whole_pictures(page)
    expect_no_freeze(page)


def test_curves_of_a_real_run_are_all_drawn(open_gallery: OpenGallery, real_run: RunFolder) -> None:
    page = open_gallery("curves", run=real_run)
    charts = page.locator("figure.chart")
    expect(charts.first).to_be_visible()
    titles = charts.locator("h4").all_text_contents()
    assert {"Probability ratio", "Effective sample size", "Loss", "Most memory in use"} <= {*titles}
    for title, chart in zip(titles, charts.all(), strict=True):
        chart.scroll_into_view_if_needed()
        expect(chart.locator("canvas")).to_be_visible()
        assert lines_drawn(page, title) > 0, title
    expect_no_freeze(page)


def lines_drawn(page: Page, title: str) -> int:
    """How many lines of a chart, by their colours, are on its canvas; waits for the first."""
    drawn = page.wait_for_function(
        """(title) => {
            const charts = [...document.querySelectorAll("figure.chart")];
            const chart = charts.find((each) => each.querySelector("h4").textContent === title);
            const { width, height } = chart.querySelector("canvas");
            const context = chart.querySelector("canvas").getContext("2d");
            const { data } = context.getImageData(0, 0, width, height);
            const isDrawn = (colour) => {
              const wanted = colour.match(/\\d+/g).map(Number);
              let count = 0;
              for (let at = 0; at < data.length; at += 4) {
                const away = wanted.map((value, part) => Math.abs(value - data[at + part]));
                count += data[at + 3] === 255 && Math.max(...away) < 8;
              }
              return count >= 10;
            };
            const lines = [...chart.querySelectorAll(".legend line")];
            return lines.map((line) => getComputedStyle(line).stroke).filter(isDrawn).length;
        }""",
        arg=title,
    )
    return int(drawn.json_value())


@pytest.fixture(scope="module")
def edit_run(tmp_path_factory: pytest.TempPathFactory, configs_dir: Path) -> RunFolder:
    """What train.py left of two steps on two edits."""
    folder = tmp_path_factory.mktemp("edits")
    rows = []
    befores = signs_of_words(("KITE", "MENU"), seed=2)
    for before, word in zip(befores, ("OPEN", "SHOP"), strict=True):
        names = {"source": f"{before.word}.png", "target": f"{word}.png"}
        for name, sign in zip(names.values(), (before, replace(before, word=word)), strict=True):
            Image.fromarray(draw_sign(sign).permute(1, 2, 0).numpy()).save(folder / name)
        rows.append({"id": word, "prompt": f'write "{word}" instead', **names})
    data = folder / "edits.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    overrides = (
        *(f"data.path={data}", f"data.eval_path={data}", "data.sources=1"),
        *("train.steps=2", "train.eval_every=2", "trackers=[]", f"run_dir={folder / 'run'}"),
        *("rollout.prompts_per_step=2", "rollout.group_size=2"),
    )
    command = [sys.executable, str(configs_dir.parent / "train.py"), *overrides]
    ended = subprocess.run(command, cwd=configs_dir.parent, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return RunFolder(folder / "run")


@pytest.mark.parametrize(
    ("fragment", "sources"),
    [("progress", "Source of OPEN"), ("groups?step=1", "Source of OPEN")],
)
def test_views_of_an_edit_run_show_the_source(
    open_gallery: OpenGallery, edit_run: RunFolder, fragment: str, sources: str
) -> None:
    page = open_gallery(fragment, run=edit_run)
    source = page.get_by_alt_text(sources, exact=True).first
    source.scroll_into_view_if_needed()
    expect(source).to_be_visible()
    expect(source).to_have_js_property("complete", True)
    expect_whole_pictures(page)
    expect(page.locator(".problem")).to_have_count(0)


def test_large_view_of_an_edit_shows_source_target_sample_and_both_differences(
    open_gallery: OpenGallery, edit_run: RunFolder
) -> None:
    page = open_gallery("groups?step=1&prompt=OPEN&sample=0&large=1", run=edit_run)
    page.keyboard.press("s")
    captions = page.get_by_role("dialog").locator("figcaption")
    expect(captions).to_have_text(["Sample", "Target", "Source"])
    page.keyboard.press("d")
    label = page.locator(".large-label")
    expect(label).to_have_text("Difference, brightened: sample less target")
    page.get_by_role("dialog").get_by_label("With").select_option("Source")
    expect(label).to_have_text("Difference, brightened: sample less source")
