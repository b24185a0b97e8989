"""The Start view: gain, reward, canaries, and the pictures to look at first."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from glm_grpo.gallery import write_gallery
from glm_grpo.gallery.data import SummaryRow
from glm_grpo.run.folder import RunFolder
from rewards.audit.canaries import Band
from tests.browser.conftest import OpenGallery

# `gallery_run` has evaluations at steps 0, 6 and 12, two samples a prompt. From the first to the
# last ocr of `plain` rises by 0.5, its totals by 0.25 * 0.5 = 0.125; see conftest.py.
NOT_FOUND = "ERR_FILE_NOT_FOUND"


def test_start_is_the_first_view_and_tells_the_gain_so_far(open_gallery: OpenGallery) -> None:
    page = open_gallery()
    gain = page.get_by_role("region", name="Gain on held-out prompts")
    # 0.125 for one of four prompts.
    expect(gain.locator("strong")).to_have_text("+0.031")
    expect(gain).to_contain_text("from step 0 to step 12")
    expect(gain).to_contain_text("The interval comes with the end of the run")
    expect(page.locator("figure.chart h4")).to_have_text("Reward")
    expect(page.locator("figure.chart canvas")).to_be_visible()
    expect(page.locator("figure.chart .legend")).to_contain_text("reward/mean")
    expect(page.get_by_role("region", name="Canaries")).to_contain_text("None watch this run")


@pytest.mark.parametrize(
    ("low", "high", "verdict", "kind"),
    [(0.25, 0.5, "better", "better"), (-0.25, 0.5, "no clear change", "")],
)
def test_start_tells_the_gain_with_its_interval(
    low: float,
    high: float,
    verdict: str,
    kind: str,
    open_gallery: OpenGallery,
    gallery_run: RunFolder,
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(gallery_run.path, run.path)
    total = SummaryRow("total", before=0.5, after=0.875, difference=0.375, low=low, high=high)
    term = SummaryRow("lpips", before=0.75, after=0.25, difference=-0.5, low=-0.625, high=-0.375)
    write_gallery(run, [term, total])
    gain = open_gallery(run=run).get_by_role("region", name="Gain on held-out prompts")
    expect(gain.locator(".start-gain strong")).to_have_text("+0.375")
    expect(gain.locator(".start-gain strong")).to_have_class(kind)
    sign = "\u2212" if low < 0 else "+"
    expect(gain).to_contain_text(f"95 % interval {sign}0.250 to +0.500: {verdict}")
    cells = gain.locator("tbody tr").first.locator("th, td")
    change = "\u22120.500"
    interval = "\u22120.625 to \u22120.375"
    expect(cells).to_have_text(["lpips", "0.750", "0.250", change, interval])
    expect(cells.nth(3)).to_have_class("worse")
    assert asdict(total).keys() == {"name", "before", "after", "difference", "low", "high"}


def test_start_shows_what_changed_most_and_the_ends_of_the_last_evaluation(
    open_gallery: OpenGallery,
) -> None:
    page = open_gallery()
    gained = page.get_by_role("region", name="Most gained").get_by_role("listitem")
    expect(gained).to_have_count(1)
    expect(gained).to_contain_text("plain total 0.500 to 0.625 +0.125")
    expect(gained.locator("figcaption")).to_have_text(
        [re.compile(r"step 0\s*asked CAT, read CXT"), re.compile(r"step 12\s*asked CAT, read CXT")]
    )
    expect(gained.locator("img").nth(1)).to_have_attribute("src", "thumbs/eval-000012/plain-0.webp")
    expect(page.get_by_role("region", name="Most lost")).to_contain_text("No picture did.")
    # The best sample of each prompt, then the worst of each.
    ends = {
        "Best of": ["masked total 0.750", "plain total 0.625", "total 0.500", "flat total 0.375"],
        "Worst of": ["masked total 0.000"],
    }
    for name, texts in ends.items():
        items = page.get_by_role("region", name=name).get_by_role("listitem")
        expect(items).to_have_count(4)
        for index, text in enumerate(texts):
            expect(items.nth(index)).to_contain_text(text)
    gained.get_by_role("link", name="plain", exact=True).click()
    expect(page.locator(".is-pinned")).to_have_count(1)
    page.wait_for_url(re.compile("#progress.prompt=plain&step=12&sample=0"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("fragment", ["start", "letters", "marks"])
def test_first_looks_are_accessible_and_fit_a_phone(
    open_gallery: OpenGallery,
    find_violations: Callable[[Page], list[str]],
    real_run: RunFolder,
    fragment: str,
    scheme: str,
) -> None:
    size = {"width": 360, "height": 740}
    page = open_gallery(fragment, run=real_run, color_scheme=scheme, viewport=size)
    assert find_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_canaries_of_evaluations_stand_until_the_next_one(
    open_gallery: OpenGallery, gallery_run: RunFolder, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(gallery_run.path, run.path)
    bands = {
        "edge_density": Band(mean=0.5, std=0.125, prompts=16),
        # 6 * 0.125 * sqrt(1/16 + 1/16) = 0.265 below the mean.
        "judge": Band(mean=0.5, std=0.125, prompts=16, is_of_evaluations=True),
        "reader": Band(mean=0.5, std=0.125, prompts=16, is_of_evaluations=True),
    }
    run.canaries_path.write_text(json.dumps({name: asdict(band) for name, band in bands.items()}))
    rows = [
        {"step": 6, "canary/edge_density": 0.5, "canary/judge": 0.2, "canary/reader": 0.99},
        {"step": 12, "canary/edge_density": 0.5},
    ]
    run.metrics_path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_gallery(run, ())
    canaries = open_gallery(run=run).get_by_role("region", name="Canaries")
    expect(canaries).to_contain_text("1 of 3 outside their band at step 12")
    expect(canaries.locator("tbody tr").nth(1)).to_have_text("judge0.2 outsidefrom 0.2348 up")
    expect(canaries.locator("tbody tr").nth(2)).to_have_text("reader0.99from 0.2348 up")
