"""Other runs beside a run, in Progress and in the large view, as a reader meets them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from glm_grpo.compare.beside import match_runs
from glm_grpo.gallery import write_beside, write_gallery
from glm_grpo.run.folder import RunFolder
from tests.browser.conftest import OpenGallery

NAME = "longer <b>run</b>"
# At step 6 `plain` has 0.25 more than at step 0, at step 12 0.125 more: see conftest.py.
CELL = f"plain, {NAME}, step 6, sample 0: total 0.750, change +0.125"


@pytest.fixture(scope="module")
def pair(gallery_run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of the other tests; beside it the same as it was at step 6, under another name."""
    folder = tmp_path_factory.mktemp("beside")
    run, other = RunFolder(folder / "run"), RunFolder(folder / "other")
    for each in (run, other):
        shutil.copytree(gallery_run.path, each.path)
    config = other.config_path.read_text()
    other.config_path.write_text(config.replace("  name: null", f"  name: {NAME}"))
    other.evaluation_path(12).unlink()
    write_beside(run, match_runs(run.path, [other.path]))
    write_gallery(run, ())
    shutil.rmtree(other.path)
    return run


def test_progress_has_a_column_for_another_run(
    pair: RunFolder, open_gallery: OpenGallery, find_violations: Callable[[Page], list[str]]
) -> None:
    page = open_gallery("progress", run=pair)
    heads = page.get_by_role("columnheader")
    expect(heads.last).to_contain_text(NAME)
    expect(heads.last).to_contain_text("Step 6")
    cell = page.get_by_role("button", name=CELL)
    picture = cell.locator("img")
    expect(picture).to_have_attribute("src", "beside/1/eval-000006/plain-0.webp")
    expect(picture).to_have_js_property("naturalWidth", 64)
    # It is a column as all others: by arrow keys, with scores, sample by sample, as a difference.
    page.get_by_role("button", name=re.compile("^plain, step 12, sample 0")).focus()
    page.keyboard.press("ArrowRight")
    expect(cell).to_be_focused()
    details = page.get_by_role("complementary", name="Scores of the picture")
    expect(details.get_by_role("heading")).to_have_text(f"plain: {NAME}, step 6, sample 0")
    expect(details).to_contain_text("Against step 12")
    expect(details.get_by_role("row", name="ocr")).to_contain_text("+0.500")
    # Marks are of pictures of this run.
    expect(details.get_by_role("button", name="Star")).to_have_count(0)
    assert find_violations(page) == []
    page.get_by_label("Sample").select_option("1")
    page.get_by_label("Difference to the target").check()
    difference = page.get_by_role(
        "button", name=f"Difference to the target: plain, {NAME}, step 6, sample 1"
    )
    expect(difference.locator("img").last).to_have_attribute(
        "src", "beside/1/eval-000006/plain-1.webp"
    )


def test_large_view_holds_a_picture_against_that_of_another_run(
    pair: RunFolder, open_gallery: OpenGallery, find_violations: Callable[[Page], list[str]]
) -> None:
    page = open_gallery("progress", run=pair)
    page.get_by_role("button", name=CELL).click()
    large = page.get_by_role("dialog")
    expect(large.get_by_role("heading", level=2)).to_have_text("plain: step 12, sample 0")
    other = large.get_by_role("img", name=f"{NAME}, step 6", exact=True)
    expect(other).to_be_visible()
    expect(other).to_have_attribute("src", "beside/1/eval-000006/plain-0.png")
    expect(large).to_contain_text(f"{NAME}, step 6: total 0.750")
    page.keyboard.press(" ")
    expect(other).to_be_hidden()
    # It stays what is compared with, at every step and prompt.
    page.keyboard.press("PageUp")
    # This prompt has a target, which would come first.
    expect(large.get_by_role("heading", level=2)).to_have_text("plain: step 6, sample 0")
    expect(large.get_by_label("With")).to_have_value("beside-1")
    page.keyboard.press("ArrowDown")
    expect(large.get_by_role("heading", level=2)).to_have_text("masked: step 6, sample 0")
    expect(large.get_by_label("With")).to_have_value("beside-1")
    page.keyboard.press("s")
    expect(other).to_be_visible()
    assert find_violations(page) == []
