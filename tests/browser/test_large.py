"""The large view of a picture, and the sizes of pictures in the views, as a reader meets them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from glm_grpo.run.folder import RunFolder
from tests.browser.conftest import SIDE, OpenGallery, change_data

# Of `plain` in step 1, by reward: samples 2, 0 and 1; see RAW in conftest.py.
BEST = "groups?step=1&prompt=plain&sample=2&large=1"
DESKTOP = {"width": 1440, "height": 900}


def large(page: Page) -> Locator:
    return page.get_by_role("dialog")


def expect_title(page: Page, title: str) -> None:
    expect(large(page).get_by_role("heading", level=2)).to_have_text(title)


def sheets(page: Page) -> list[dict[str, float]]:
    """Where the pictures are, in pixels of the page."""
    boxes = [sheet.bounding_box() for sheet in large(page).locator(".large-sheet:has(img)").all()]
    return [{name: round(value) for name, value in (box or {}).items()} for box in boxes]


def test_large_view_fills_the_window_with_the_picture(open_gallery: OpenGallery) -> None:
    page = open_gallery(BEST, viewport=DESKTOP)
    box = large(page).bounding_box()
    assert box == {"x": 0, "y": 0, **DESKTOP}
    # All that the head leaves of the height; a picture of 1,024 pixels is then seen at 82 %.
    assert sheets(page)[0]["height"] > 0.82 * 1024
    page.keyboard.press("1")
    expect(large(page).locator(".large-scale")).to_have_text("100 %")
    assert sheets(page)[0]["width"] == SIDE
    page.keyboard.press("0")
    assert sheets(page)[0]["height"] > 0.82 * 1024


def test_large_view_goes_through_samples_and_prompts_by_keys(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    opener = page.get_by_role("button", name="plain, sample 0, rank 2 of 3", exact=True)
    opener.press("Enter")
    expect_title(page, "Step 1: plain, sample 0, rank 2 of 3")
    expect(large(page)).to_contain_text("Noise seed 9223372036854775807")
    expect(large(page).get_by_role("group", name="Pictures of Step 1")).to_be_focused()
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


def test_space_flickers_between_sample_and_target(open_gallery: OpenGallery) -> None:
    page = open_gallery(BEST)
    sample = large(page).get_by_role("img", name="plain, sample 2", exact=False)
    target = large(page).get_by_role("img", name="Target", exact=True)
    expect(sample).to_be_visible()
    expect(target).to_be_hidden()
    page.keyboard.press(" ")
    expect(target).to_be_visible()
    expect(sample).to_be_hidden()
    expect(large(page).locator(".large-label")).to_have_text("Target")
    # A click on a tool leaves the key to the pictures; a button that has the focus is pressed.
    large(page).get_by_role("button", name="Larger").click()
    page.keyboard.press(" ")
    expect(sample).to_be_visible()
    large(page).get_by_role("button", name="Figures").focus()
    page.keyboard.press(" ")
    expect(sample).to_be_visible()
    expect(large(page).get_by_role("region", name="Figures")).to_have_count(0)


def test_a_click_on_a_target_shows_it_large(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    page.get_by_role("button", name="Target of plain").click()
    expect(large(page).get_by_role("img", name="Target", exact=True)).to_be_visible()
    page.keyboard.press(" ")
    expect(large(page).get_by_role("img", name="plain, sample 2", exact=False)).to_be_visible()


def test_wheel_zooms_around_the_pointer_and_a_drag_moves(open_gallery: OpenGallery) -> None:
    page = open_gallery(BEST, viewport=DESKTOP)
    before = sheets(page)[0]
    pointer = (before["x"] + before["width"] / 2, before["y"] + before["height"] / 4)
    page.mouse.move(*pointer)
    # Twice a factor of e to 0.4: enough for the picture to fill the pane on all sides.
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
    page.mouse.dblclick(*pointer)
    page.wait_for_function(
        "width => document.querySelector('.large-sheet').clientWidth < width", arg=after["width"]
    )
    assert sheets(page)[0] == before


def test_side_by_side_shares_one_zoom(open_gallery: OpenGallery) -> None:
    page = open_gallery(BEST, viewport=DESKTOP)
    large(page).get_by_role("radio", name="Side by side").check(force=True)
    expect(large(page).locator("figcaption")).to_have_text(["Sample", "Target"])
    page.keyboard.press("+")
    page.keyboard.press("Shift+ArrowRight")
    sample, target = sheets(page)
    panes = [pane.bounding_box() for pane in large(page).locator(".large-pane").all()]
    assert sample["width"] == target["width"]
    left, right = ((pane or {})["x"] for pane in panes)
    assert round(sample["x"] - left) == round(target["x"] - right)
    # Remembered in the next picture and after a reload.
    page.reload()
    expect(large(page).locator("figcaption")).to_have_text(["Sample", "Target"])


def test_a_drag_wipes_and_shift_with_arrows_does(open_gallery: OpenGallery) -> None:
    page = open_gallery(BEST, viewport=DESKTOP)
    page.keyboard.press("w")
    divider = large(page).locator(".large-divider")
    expect(divider).to_have_attribute("style", re.compile(r"left: 50%"))
    box = sheets(page)[0]
    page.mouse.move(box["x"] + box["width"] / 2, 400)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4, 400)
    page.mouse.up()
    left = float(divider.evaluate("divider => Number.parseFloat(divider.style.left)"))
    assert left == pytest.approx(25, abs=0.5)
    page.keyboard.press("Shift+ArrowRight")
    moved = float(divider.evaluate("divider => Number.parseFloat(divider.style.left)"))
    assert moved == pytest.approx(left + 5)
    clip = large(page).locator(".large-sheet:has(img)").last
    assert clip.evaluate("sheet => sheet.style.clipPath").startswith(
        f"inset(0px 0px 0px {moved:.1f}"
    )


def test_difference_lies_over_the_target(open_gallery: OpenGallery) -> None:
    page = open_gallery(BEST)
    page.keyboard.press("d")
    layers = large(page).locator(".difference img")
    expect(layers).to_have_count(2)
    assert layers.last.evaluate("layer => getComputedStyle(layer).mixBlendMode") == "difference"
    page.keyboard.press("ArrowDown")
    expect(large(page).locator(".large-label")).to_have_text("Sample: nothing to compare with")


def test_large_view_compares_with_an_earlier_step(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=2&prompt=flat&sample=1&large=1")
    compare = large(page).get_by_label("With")
    compare.select_option("an earlier step")
    expect(compare).to_have_value("earlier-1")
    page.keyboard.press("b")
    shown = large(page).get_by_role("img", name="Step 1, sample 1")
    expect(shown).to_have_attribute("src", "../images/step-000001/flat-1.png")
    expect(shown).to_be_visible()


def test_progress_opens_large_and_goes_through_steps_samples_and_prompts(
    open_gallery: OpenGallery,
) -> None:
    page = open_gallery("progress")
    page.get_by_role("button", name="plain, step 6, sample 0").click()
    expect_title(page, "plain: step 6, sample 0")
    page.keyboard.press("PageUp")
    expect_title(page, "plain: step 0, sample 0")
    large(page).get_by_role("button", name="Step after").click()
    page.keyboard.press("ArrowRight")
    expect_title(page, "plain: step 6, sample 1")
    page.keyboard.press("ArrowDown")
    expect_title(page, "masked: step 6, sample 1")
    # It has no target.
    large(page).get_by_label("With").select_option("an earlier step")
    expect(large(page).get_by_label("With")).to_have_value("earlier-0")
    page.go_back()
    expect(page.locator("dialog")).to_have_count(0)


@pytest.mark.parametrize(
    ("fragment", "picture"),
    [
        ("find?step=1", ".find-region .picture"),
        ("find?of=evaluations", ".find-region .picture"),
        ("weights", ".weights-samples .picture"),
    ],
)
def test_other_views_open_large_and_come_back(
    open_gallery: OpenGallery, fragment: str, picture: str
) -> None:
    page = open_gallery(fragment, allows="ERR_FILE_NOT_FOUND")
    heading = page.locator("main h2").first.inner_text()
    page.locator(picture).first.click()
    expect(large(page)).to_be_visible()
    title = large(page).get_by_role("heading", level=2)
    first = title.inner_text()
    page.keyboard.press("ArrowRight")
    expect(title).not_to_have_text(first)
    page.keyboard.press("Escape")
    expect(large(page)).to_have_count(0)
    assert page.locator("main h2").first.inner_text() == heading


def test_no_click_on_a_picture_leaves_the_gallery(open_gallery: OpenGallery) -> None:
    for fragment in ("progress", "groups?step=1", "weights", "find?of=both", "film"):
        page = open_gallery(fragment, allows="ERR_FILE_NOT_FOUND")
        assert page.locator("main a:has(img)").count() == 0


def test_large_view_lists_its_keys(open_gallery: OpenGallery) -> None:
    page = open_gallery(BEST)
    page.keyboard.press("?")
    expect(large(page).get_by_role("table", name="Keys of the large view")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("key", ["o", "s", "w", "d"])
def test_large_view_passes_axe(
    open_gallery: OpenGallery,
    find_violations: Callable[[Page], list[str]],
    key: str,
    scheme: str,
) -> None:
    page = open_gallery(BEST, color_scheme=scheme)
    page.keyboard.press(key)
    page.keyboard.press("?")
    expect(large(page).get_by_role("table", name="Keys of the large view")).to_be_visible()
    assert find_violations(page) == []


def test_phones_swipe_through_samples_and_see_figures_below(open_gallery: OpenGallery) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    page = open_gallery(BEST, **phone)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    stage = large(page).get_by_role("group", name="Pictures of")
    swipe(page, stage, (300, 500), (100, 505))
    expect_title(page, "Step 1: plain, sample 0, rank 2 of 3")
    expect(large(page).get_by_role("region", name="Figures")).to_have_count(0)
    large(page).get_by_role("button", name="Figures").tap()
    figures = large(page).get_by_role("region", name="Figures").bounding_box()
    assert figures is not None
    assert figures["width"] == 390


def swipe(page: Page, stage: Locator, start: tuple[int, int], end: tuple[int, int]) -> None:
    """A finger that goes from one place of the page to another."""
    session = page.context.new_cdp_session(page)

    def touch(kind: str, points: list[dict[str, Any]]) -> None:
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", [{"x": start[0], "y": start[1]}])
    touch("touchMove", [{"x": end[0], "y": end[1]}])
    # It rests: after a fling the browser takes the next tap for what ends it.
    page.wait_for_timeout(300)
    touch("touchMove", [{"x": end[0], "y": end[1] + 1}])
    touch("touchEnd", [])


@pytest.fixture
def grow(gallery_run: RunFolder, tmp_path: Path) -> Callable[[int, int], RunFolder]:
    """Makes a gallery of a step with so many groups of so many samples, copies of one another."""

    def copy(count: int, samples: int) -> RunFolder:
        shutil.copytree(gallery_run.path, tmp_path / "run")
        run = RunFolder(tmp_path / "run")

        def multiply(data: Any) -> None:
            plain = data["steps"][0]["groups"][0]
            for name in ("images", "total", "advantage", "penalty"):
                plain[name] = (plain[name] * samples)[:samples]
            for part in ("raw", "notes"):
                columns = plain[part].items()
                plain[part] = {name: (values * samples)[:samples] for name, values in columns}
            groups = [{**plain, "prompt_id": f"plain {index}"} for index in range(count)]
            data["steps"] = [{"step": 1, "groups": groups}]

        change_data(run, "steps-000001", multiply)
        change_data(run, "run", lambda data: data.update(group_size=samples))
        return run

    return copy


@pytest.mark.parametrize("width", [1440, 1920])
def test_eight_samples_stand_in_one_row(
    open_gallery: OpenGallery, grow: Callable[[int, int], RunFolder], width: int
) -> None:
    page = open_gallery("groups?step=1", run=grow(1, 8), viewport={"width": width, "height": 900})
    samples = page.locator(".sample")
    expect(samples).to_have_count(8)
    boxes = [sample.bounding_box() or {} for sample in samples.all()]
    assert len({box["y"] for box in boxes}) == 1
    # They take the width there is.
    assert boxes[-1]["x"] + boxes[-1]["width"] > 0.9 * width


def test_size_and_density_are_remembered(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    page.get_by_label("Size").fill("240")
    page.get_by_label("Show").select_option("Captions")
    sample = page.locator(".sample").first
    expect(sample.locator(".scores")).to_have_count(0)
    expect(sample).to_contain_text("total 0.625, advantage +0.87")
    assert (sample.bounding_box() or {})["width"] >= 240
    page.reload()
    expect(page.get_by_label("Size")).to_have_value("240")
    expect(page.get_by_label("Show")).to_have_value("captions")
    page.get_by_label("Show").select_option("Pictures")
    expect(sample).to_have_text("")
    # Another view has sizes of its own.
    page.evaluate("location.hash = '#progress'")
    expect(page.get_by_label("Show")).to_have_value("captions")
    page.get_by_label("Show").select_option("All figures")
    expect(page.locator(".cell").first.locator("dt")).to_have_text(["lpips", "ocr"])
    page.evaluate("location.hash = '#groups?step=1'")
    page.get_by_role("button", name="Usual size").click()
    expect(page.get_by_label("Show")).to_have_value("figures")


def test_sizes_work_where_the_browser_stores_nothing(open_gallery: OpenGallery) -> None:
    page = open_gallery("progress")
    page.evaluate(
        """() => Object.defineProperty(window, "localStorage", {
            get() { throw new DOMException("refused", "SecurityError"); } })"""
    )
    page.get_by_label("Size").fill("96")
    # Less the space around it.
    expect(page.locator(".cell").first.locator(".picture")).to_have_css("width", "88px")


def test_sixteen_groups_of_32_are_no_endless_page(
    open_gallery: OpenGallery, grow: Callable[[int, int], RunFolder]
) -> None:
    page = open_gallery("groups?step=1", run=grow(16, 32), viewport=DESKTOP)
    for group in page.locator(".group").all():
        group.scroll_into_view_if_needed()
        expect(group.locator(".sample")).to_have_count(32)
    # With all figures at the usual size it is 23,000.
    assert page.evaluate("document.documentElement.scrollHeight") < 8_000
    expect(page.get_by_label("Show")).to_have_value("pictures")
