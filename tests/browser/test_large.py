"""The large view of an image, as a reader meets it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import NOT_FOUND, SIDE, OpenGallery, show

# Of `plain` in step 1, by reward: samples 2, 0 and 1; see RAW in conftest.py.
BEST = "groups?step=1&prompt=plain&sample=2&large=1"
DESKTOP = {"width": 1440, "height": 900}


def large(page: Page) -> Locator:
    return page.get_by_role("dialog")


def expect_title(page: Page, title: str) -> None:
    expect(large(page).get_by_role("heading", level=2)).to_have_text(title)


def sheets(page: Page) -> list[dict[str, float]]:
    """Where the images are, in pixels of the page."""
    boxes = [sheet.bounding_box() for sheet in large(page).locator(".large-sheet:has(img)").all()]
    return [{name: round(value) for name, value in (box or {}).items()} for box in boxes]


def test_large_view_fills_the_window_zooms_flickers_and_compares(
    open_gallery: OpenGallery,
) -> None:
    page = open_gallery(BEST, viewport=DESKTOP)
    assert large(page).bounding_box() == {"x": 0, "y": 0, **DESKTOP}
    page.keyboard.press("1")
    expect(large(page).locator(".large-scale")).to_have_text("100 %")
    assert sheets(page)[0]["width"] == SIDE
    page.keyboard.press("0")
    before = sheets(page)[0]
    # All that the head leaves of the height; an image of 1,024 pixels is then seen at 82 %.
    assert before["height"] > 0.82 * 1024

    pointer = (before["x"] + before["width"] / 2, before["y"] + before["height"] / 4)
    page.mouse.move(*pointer)
    # Twice a factor of e to 0.4: enough for the image to fill the pane on all sides.
    page.mouse.wheel(0, -200)
    page.mouse.wheel(0, -200)
    page.wait_for_function(
        "width => document.querySelector('.large-sheet').clientWidth > width",
        arg=2 * before["width"],
    )
    after = sheets(page)[0]
    # What was below the pointer still is: a quarter of the height from the top.
    assert after["y"] + after["height"] / 4 == pytest.approx(pointer[1], abs=2)
    page.mouse.down()
    page.mouse.move(pointer[0] - 50, pointer[1] - 30)
    page.mouse.up()
    moved = sheets(page)[0]
    assert (moved["x"], moved["y"]) == pytest.approx((after["x"] - 50, after["y"] - 30), abs=2)

    sample = large(page).get_by_role("img", name="plain, sample 2", exact=False)
    target = large(page).get_by_role("img", name="Target", exact=True)
    expect(target).to_be_hidden()
    page.keyboard.press(" ")
    expect(target).to_be_visible()
    expect(sample).to_be_hidden()

    large(page).get_by_role("radio", name="Side by side").check(force=True)
    expect(large(page).locator("figcaption")).to_have_text(["Sample", "Target"])
    # Remembered after a reload.
    page.reload()
    expect(large(page).locator("figcaption")).to_have_text(["Sample", "Target"])
    page.keyboard.press("w")
    divider = large(page).locator(".large-divider")
    expect(divider).to_have_attribute("style", re.compile(r"left: 50%"))
    page.keyboard.press("Shift+ArrowRight")
    expect(divider).to_have_attribute("style", re.compile(r"left: 55%"))
    page.keyboard.press("d")
    layers = large(page).locator(".difference img")
    expect(layers).to_have_count(2)
    assert layers.last.evaluate("layer => getComputedStyle(layer).mixBlendMode") == "difference"


def test_large_view_opens_from_every_view_and_goes_through_samples_and_prompts_by_keys(
    open_gallery: OpenGallery,
) -> None:
    page = open_gallery("groups?step=1", allows=NOT_FOUND)
    opener = page.get_by_role("button", name="plain, sample 0, rank 2 of 3", exact=True)
    opener.press("Enter")
    expect_title(page, "Step 1: plain, sample 0, rank 2 of 3")
    expect(large(page)).to_contain_text("Noise seed 9223372036854775807")
    expect(large(page).get_by_role("group", name="Images of Step 1")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect_title(page, "Step 1: plain, sample 1, rank 3 of 3")
    # Samples of `masked` by reward: 1, 2 and 0. Down keeps the place in the row.
    page.keyboard.press("ArrowDown")
    expect_title(page, "Step 1: masked, sample 0, rank 3 of 3")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    expect_title(page, "Step 1: masked, sample 1, rank 1 of 3")
    large(page).get_by_role("button", name="Previous prompt").click()
    expect_title(page, "Step 1: plain, sample 2, rank 1 of 3")
    expect(large(page).get_by_role("button", name="Previous sample")).to_be_disabled()
    page.keyboard.press("Escape")
    expect(large(page)).to_have_count(0)
    expect(opener).to_be_focused()

    for fragment, image in (
        ("find?step=1", ".find-region .image"),
        ("weights", ".weights-samples .image"),
    ):
        show(page, fragment)
        page.locator(image).first.click()
        title = large(page).get_by_role("heading", level=2)
        first = title.inner_text()
        page.keyboard.press("ArrowRight")
        expect(title).not_to_have_text(first)
        page.keyboard.press("Escape")
        expect(large(page)).to_have_count(0)
        expect(page.locator(image).first).to_be_visible()
