"""A page that is open while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from glm_grpo.run.folder import RunFolder
from glm_grpo.studio.gallery.server import GalleryServer
from tests.browser.conftest import NOT_FOUND, OpenGallery, change_data, copy_run


@pytest.fixture
def young_run(gallery_run: RunFolder, tmp_path: Path) -> RunFolder:
    """The common run when it had made three steps and one evaluation, a moment ago."""
    run = copy_run(gallery_run, tmp_path / "run")

    def rewind(data: Any) -> None:
        data["chunks"] = data["chunks"][:1]
        data["evaluations"] = data["evaluations"][:1]
        # Steps of a second: it is looked at every two.
        data.update(recorded=time.time(), seconds_per_step=1)

    change_data(run, "run", rewind)
    return run


def go_on(run: RunFolder) -> None:
    """Steps 4 to 12, of which step 12 is stored, and an evaluation."""

    def add(data: Any) -> None:
        data["chunks"].append({"key": "steps-000011", "steps": [12]})
        data["evaluations"].append({"step": 6, "key": "evaluation-000006"})
        data["recorded"] = time.time()

    change_data(run, "run", add)


@pytest.fixture
def open_served(browser: Browser, young_run: RunFolder) -> Iterator[Callable[[str], Page]]:
    """Opens an address of the gallery as `glm-grpo gallery --serve` gives it."""
    with GalleryServer(young_run, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        context = browser.new_context()

        def open_page(fragment: str) -> Page:
            page = context.new_page()
            page.goto(f"{server.url}#{fragment}")
            return page

        yield open_page
        context.close()
        server.shutdown()
        thread.join()


def test_served_page_announces_new_steps_where_it_does_not_follow(
    open_served: Callable[[str], Page], young_run: RunFolder
) -> None:
    page = open_served("groups?step=2")
    choice = page.get_by_label("Training step")
    expect(choice).to_have_value("2")
    page.get_by_role("button", name="step 3 of 40").click()
    page.get_by_label("Follow").uncheck()
    page.keyboard.press("Escape")
    go_on(young_run)
    page.get_by_role("banner").get_by_role("button", name="9 new steps").click()
    bar = page.get_by_role("progressbar", name="Part of the run that is done")
    expect(bar).to_have_js_property("value", 12)
    # Who looks at an older step stays there.
    expect(choice).to_have_value("2")
    expect(choice.get_by_role("option", name="12")).to_be_attached()


def test_page_from_disk_follows_the_run_by_itself(
    open_gallery: OpenGallery, young_run: RunFolder
) -> None:
    page = open_gallery("progress", run=young_run, allows=NOT_FOUND)
    heads = page.locator(".progress-table thead th")
    expect(heads).to_have_count(3)
    row = page.locator(".row-id").first.element_handle()
    go_on(young_run)
    expect(heads).to_have_count(4)
    # The table is the same one: what has the focus, and what was scrolled to, stays.
    assert row is not None
    assert row.evaluate("row => row.isConnected")
    # What it has stays where the run can no longer be read.
    (young_run.gallery_path.parent / "data" / "run.js").unlink()
    expect(page.get_by_role("banner")).to_contain_text("Cannot read data/run.js now")
    expect(heads).to_have_count(4)


def test_head_tells_the_time_left_and_silence(
    open_gallery: OpenGallery, young_run: RunFolder
) -> None:
    change_data(young_run, "run", lambda data: data.update(seconds_per_step=120, seconds_left=4440))
    head = open_gallery(run=young_run).get_by_role("banner")
    # 37 steps of two minutes.
    expect(head).to_contain_text("step 3 of 40, about 1 h 14 min left")
    change_data(young_run, "run", lambda data: data.update(recorded=time.time() - 7200))
    head = open_gallery(run=young_run).get_by_role("banner")
    expect(head).to_contain_text("step 3 of 40, no new step for 2 h 0 min")
