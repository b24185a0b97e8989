"""Start, Progress and the report, as a reader meets them.

The numbers are those of `RAW` in conftest.py, worked out there.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

from playwright.sync_api import expect

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import SummaryRow
from glm_grpo.studio.gallery import write_gallery
from rewards.canaries import Band
from tests.browser.conftest import OpenGallery, copy_run, expect_cells, show


def test_start_tells_the_gain_so_far_and_leads_to_what_changed(open_gallery: OpenGallery) -> None:
    page = open_gallery()
    gain = page.get_by_role("region", name="Gain on held-out prompts")
    # 0.125 for one of four prompts.
    expect(gain.locator("strong")).to_have_text("+0.031")
    expect(gain).to_contain_text("The interval is computed at the end of the run")
    expect(page.locator("figure.chart canvas")).to_be_visible()
    expect(page.get_by_role("region", name="Canaries")).to_contain_text("This run has no canaries")
    expect(page.get_by_role("region", name="Largest losses")).to_contain_text("None.")
    # The best sample of each prompt, then the worst of each.
    for name, text in (("Highest totals", "total 0.750"), ("Lowest totals", "total 0.000")):
        items = page.get_by_role("region", name=name).get_by_role("listitem")
        expect(items).to_have_count(4)
        expect(items.first).to_contain_text(text)
    gained = page.get_by_role("region", name="Largest gains").get_by_role("listitem")
    expect(gained).to_contain_text("total 0.500 to 0.625 +0.125")
    expect(gained.locator("figcaption")).to_have_text(
        [re.compile(r"step 0\s*CXT \(wrong: X\)"), re.compile(r"step 12\s*CXT \(wrong: X\)")]
    )
    gained.get_by_role("link", name="CAT").click()
    expect(page.locator(".is-pinned")).to_have_count(1)
    page.wait_for_url(re.compile("#progress.prompt=plain&step=12&sample=0"))


def test_start_of_a_finished_run_has_intervals_canaries_and_leads_to_the_report(
    open_gallery: OpenGallery, gallery_run: RunFolder, tmp_path: Path
) -> None:
    run = copy_run(gallery_run, tmp_path / "run")
    total = SummaryRow("total", before=0.5, after=0.875, difference=0.375, low=0.25, high=0.5)
    term = SummaryRow("lpips", before=0.75, after=0.25, difference=-0.5, low=-0.625, high=-0.375)
    few = replace(total, name="few", low=math.nan, high=math.nan)
    # 6 * 0.125 * sqrt(1/16 + 1/16) = 0.265 below the mean.
    band = Band(mean=0.5, std=0.125, prompts=16, is_of_evaluations=True)
    bands = {"edge_density": Band(0.5, 0.1, 4), "judge": band, "reader": band}
    run.canaries_path.write_text(json.dumps({name: asdict(bands[name]) for name in bands}))
    rows = [{"step": 6, "canary/judge": 0.2, "canary/reader": 0.99}]
    rows.append({"step": 12, "canary/edge_density": 0.5})
    run.metrics_path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_gallery(run, [term, few, total])
    page = open_gallery(run=run, viewport={"width": 360, "height": 740})
    gain = page.get_by_role("region", name="Gain on held-out prompts")
    expect(gain.locator(".start-gain strong")).to_have_class("better")
    expect(gain).to_contain_text("95 % interval +0.250 to +0.500: better")
    rows = gain.locator("tbody tr")
    change, interval = "\u22120.500", "\u22120.625 to \u22120.375"
    cells = rows.first.locator("th, td")
    expect(cells).to_have_text(["lpips", "0.750", "0.250", change, interval])
    expect(rows.first.locator("td").nth(2)).to_have_class("worse")
    expect(rows.nth(1)).to_contain_text("too few prompts for an interval")
    canaries = page.get_by_role("region", name="Canaries").locator("tbody tr")
    expect(canaries.nth(1)).to_have_text("judge0.200 outsidefrom 0.235 up")
    expect(canaries.nth(2)).to_have_text("reader0.990from 0.235 up")

    # In a narrow window the views are behind a button.
    page.get_by_role("button", name="Views: Start").click()
    page.get_by_role("navigation").get_by_role("link", name="Before and after").click()
    page.wait_for_url("**/gallery/report.html")
    expect(page.get_by_role("heading", name="What changed")).to_be_visible()
    # Each stays one line of text, however narrow.
    commands = page.get_by_role("region", name="Commands")
    assert commands.evaluate("pre => pre.scrollWidth === pre.clientWidth")
    assert len(commands.inner_text().splitlines()) == 2


def test_progress_shows_prompts_by_evaluation_sorts_and_moves_by_keys(
    open_gallery: OpenGallery,
) -> None:
    page = open_gallery("progress")
    expect(page.locator(".progress-table thead th")).to_have_text(
        ["Prompt", "Target", re.compile("^Step 0"), re.compile("^Step 6"), re.compile("^Step 12")]
    )
    row = page.get_by_role("row").filter(has_text='a sign with the word "CAT"')
    # Sample 0: 0.5, then ocr 1 more and 0.5 more, times 0.25. The mean of both samples too.
    expect(row.locator(".cell-figures")).to_have_text(
        [r"0.500", re.compile(r"^0\.750\s+\+0\.250$"), re.compile(r"^0\.625\s+\+0\.125$")]
    )
    expect(row.locator(".row-change")).to_have_text("mean of 2 samples 0.500 +0.125")
    details = page.get_by_role("complementary")
    # Before an image is chosen, the newest of the first row: the most changed prompt.
    expect(details.get_by_role("heading")).to_have_text("plain: step 12, sample 0")
    page.get_by_role("button", name="plain, step 6, sample 0").hover()
    expect_cells(
        details.locator("tr"),
        [
            ["Term", "Score", "Since step 0"],
            ["lpips", "1.000", "0.000"],
            ["ocr", "1.000", "+1.000"],
            ["Total", "0.750", "+0.250"],
        ],
    )
    expect(details.locator("mark")).to_have_text("X")

    page.get_by_role("button", name="plain, step 0, sample 0").focus()
    for key in ("ArrowRight", "ArrowDown", "End"):
        page.keyboard.press(key)
    expect(details.get_by_role("heading")).to_have_text("masked: step 12, sample 0")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    # The address is written later than the page shows a change; both ends are waited for.
    expect(page).to_have_url(re.compile("prompt=masked&step=12&sample=0&large=1$"))
    page.keyboard.press("Escape")
    expect(page.locator(".is-pinned")).to_have_count(1)
    expect(page).to_have_url(re.compile("prompt=masked&step=12&sample=0$"))

    show(page, "progress")
    names = page.locator(".row-id")
    expect(names).to_have_text(["plain", "masked", "flat", re.compile("^<script>")])
    # Mean totals at step 12: plain 0.5, masked 0.375, flat 0.375, hostile 0.4375.
    page.get_by_label("Sort by").select_option("Highest total")
    expect(names).to_have_text(["plain", re.compile("^<script>"), "masked", "flat"])
    page.get_by_label("Sort by").select_option("Largest loss")
    expect(names.last).to_have_text("plain")
    assert page.evaluate("glmGallery.route().params.sort") == "fall"
