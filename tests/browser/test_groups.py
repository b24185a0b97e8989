"""The Groups view, as a reader meets it. The numbers are those of `RAW` in conftest.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

from glm_grpo.run.folder import RunFolder
from tests.browser.conftest import (
    GROUP_SIZE,
    NOT_FOUND,
    OpenGallery,
    change_data,
    copy_run,
    expect_cells,
    show,
)


def group_of(page: Page, prompt_id: str) -> Locator:
    return page.locator(".group").filter(has=page.get_by_role("heading", name=prompt_id, level=3))


def samples_of(page: Page, prompt_id: str) -> Locator:
    """The samples of a group, once they are there."""
    samples = group_of(page, prompt_id).locator("li.sample")
    expect(samples).to_have_count(GROUP_SIZE)
    return samples


def test_groups_and_find_call_all_images_best_that_share_the_highest_total(
    open_gallery: OpenGallery, gallery_run: RunFolder, tmp_path: Path
) -> None:
    # Of `plain` samples 0 and 2 differ by 2^-22: less than the tolerance, 2^-20 times the highest.
    def change(data: Any) -> None:
        data["steps"][0]["groups"][0]["total"] = [0.625 - 2.0**-22, 0.25, 0.625]

    run = copy_run(gallery_run, tmp_path / "run")
    change_data(run, "steps-000001", change)
    page = open_gallery("groups?step=1", run=run)
    headings = group_of(page, "plain").locator("li h4")
    expect(headings).to_have_text(["Rank 1 sample 0", "Rank 1 sample 2", "Rank 3 sample 1"])
    expect(group_of(page, "plain").locator(".problem")).to_contain_text("do not add up")
    page.evaluate("location.hash = '#find?best=1&id=plain&to=1'")
    expect(page.locator(".find-count")).to_have_text("2 of 48 images")
    expect(page.locator(".find-grid li > span:nth-of-type(1)")).to_have_text(
        [re.compile("best")] * 2
    )


def test_groups_show_samples_by_reward_with_all_that_is_known_of_them(
    open_gallery: OpenGallery,
) -> None:
    page = open_gallery("groups?step=1")
    headings = group_of(page, "plain").locator("li h4")
    expect(headings).to_have_text(["Rank 1 sample 2", "Rank 2 sample 0", "Rank 3 sample 1"])
    headings = group_of(page, "flat").locator("li h4")
    expect(headings).to_have_text(["Rank 1 sample 0", "Rank 1 sample 1", "Rank 1 sample 2"])
    best = samples_of(page, "plain").first
    expect_cells(
        best.locator(".scores tr"),
        [
            ["Term", "Score"],
            ["lpips", "1.000"],
            ["ocr", "0.500"],
            ["Total", "0.625"],
        ],
    )
    # Target and samples are one size, and figures stand level though readings take one line or two.
    pictures = group_of(page, "plain").locator(".sample .picture")
    expect(pictures).to_have_count(GROUP_SIZE + 1)
    sizes = pictures.evaluate_all("all => all.map((each) => each.offsetWidth)")
    assert len(set(sizes)) == 1
    totals = group_of(page, "plain").locator("li tfoot")
    tops = totals.evaluate_all("all => all.map((each) => each.getBoundingClientRect().top)")
    assert len(tops) == GROUP_SIZE
    assert len(set(tops)) == 1
    # The bar of the best is the longest of the group: 0.5 / 0.625 and 0.125 / 0.625 of its width.
    pieces = best.locator(".bar:not(.advantage) .piece").all()
    ends = [
        [piece.evaluate(f"piece => piece.style.{side}") for side in ("left", "width")]
        for piece in pieces
    ]
    assert ends == [["0%", "80%"], ["80%", "20%"]]

    samples = samples_of(page, "plain")
    # (0.625, 0.5, 0.25) less their mean 0.458333, over their standard deviation 0.190941.
    expect(samples.locator(".line strong")).to_have_text(["+0.873", "+0.218", "\u22121.091"])
    places = samples.locator(".advantage .piece").evaluate_all(
        "pieces => pieces.map(piece => [piece.style.left, piece.style.width])"
    )
    # The largest of the step reaches the end of its half.
    assert places[2] == ["0%", "50%"]
    assert places[0][0] == places[1][0] == "50%"
    # In order of reward: what was read of samples 2, 0 and 1.
    for index, wrong in enumerate(([], ["X"], [])):
        expect(samples.nth(index).locator(".asked-read mark")).to_have_text(wrong)
    expect(samples.nth(1).locator(".note")).to_have_text(re.compile(r"^CXT\s+\(wrong: X\)$"))
    expect(samples.nth(2).locator(".note")).to_have_text("nothing")
    said = samples.nth(1).locator(".asked-read")
    expect(said).to_have_text(re.compile(r"^asked CAT, read CXT\b"))

    page.keyboard.press("d")
    expect(page.get_by_label("Difference from target")).to_be_checked()
    expect(page).to_have_url(re.compile(r"#groups\?step=1&diff=1$"))
    layers = samples_of(page, "plain").first.locator(".difference img")
    expect(layers).to_have_count(2)
    sources = layers.evaluate_all("layers => layers.map(layer => layer.getAttribute('src'))")
    assert sources == ["thumbs/train-targets/plain.webp", "thumbs/step-000001/plain-2.webp"]
    assert layers.last.evaluate("layer => getComputedStyle(layer).mixBlendMode") == "difference"
    expect(group_of(page, "masked").locator("li.sample").first).to_contain_text("no target")
    page.get_by_label("Difference from target").uncheck()
    expect(page.locator(".difference")).to_have_count(0)

    expect(page.locator("p[role=status]")).to_contain_text("4 prompts, 12 samples")
    expect(page.locator("p[role=status]")).to_contain_text("1 flat group.")
    expect(page.locator(".group:has(.badge)")).to_have_count(1)
    masked = group_of(page, "masked")
    expect(masked).to_contain_text("Terms that do not apply here: lpips")
    expect_cells(
        samples_of(page, "masked").first.locator(".scores tbody tr"),
        [["lpips", "\u2013"], ["ocr", "1.000"]],
    )
    # What each term adds stands beside the picture, enlarged: ocr takes over the weight of lpips.
    samples_of(page, "masked").first.get_by_role("button", name="masked, sample 1").first.click()
    part = page.get_by_role("dialog").get_by_role("row", name="ocr")
    expect(part.get_by_role("cell")).to_have_text(["1.000", "0.750"])


def test_groups_remember_sizes_and_go_from_step_to_step_and_prompt_to_prompt(
    open_gallery: OpenGallery,
) -> None:
    page = open_gallery("groups?step=1", allows=NOT_FOUND)
    page.get_by_label("Size").fill("240")
    page.get_by_label("Show").select_option("Captions")
    sample = page.locator("li.sample").first
    expect(sample.locator(".scores")).to_have_count(0)
    expect(sample).to_contain_text("total 0.625, advantage +0.87")
    assert (sample.bounding_box() or {})["width"] >= 240
    page.reload()
    expect(page.get_by_label("Size")).to_have_value("240")
    expect(page.get_by_label("Show")).to_have_value("captions")
    page.get_by_label("Show").select_option("Images")
    expect(sample).to_have_text("Rank 1")
    # Another view has sizes of its own.
    page.evaluate("location.hash = '#progress'")
    expect(page.get_by_label("Show")).to_have_value("captions")
    page.get_by_label("Show").select_option("All figures")
    expect(page.locator(".cell").first.locator("dt")).to_have_text(["lpips", "ocr"])
    page.evaluate("location.hash = '#groups?step=1'")
    page.get_by_role("button", name="Usual size").click()
    expect(page.get_by_label("Show")).to_have_value("figures")

    show(page, "groups?step=3")
    choice = page.get_by_label("Training step")
    page.keyboard.press("ArrowRight")
    expect(page.locator("p[role=status]")).to_contain_text("Step 12:")
    expect(choice).to_have_value("12")
    page.get_by_role("button", name="Previous step").click()
    expect(page.locator("p[role=status]")).to_contain_text("Step 3:")
    choice.select_option("1")
    expect(page.locator("p[role=status]")).to_contain_text("Step 1:")
    expect(page.get_by_role("button", name="Previous step")).to_be_disabled()
    page.get_by_role("heading", name="Groups").focus()
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(group_of(page, "masked").get_by_role("heading", level=3)).to_be_focused()
    page.keyboard.press("k")
    expect(group_of(page, "plain").get_by_role("heading", level=3)).to_be_focused()
