"""A page that is open while the run goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from glm_grpo.run.folder import RunFolder
from tests.browser.conftest import NOT_FOUND, OpenGallery, change_data, copy_run, show


def test_a_page_follows_the_run_by_itself_and_stays_at_the_step_that_is_looked_at(
    open_gallery: OpenGallery, gallery_run: RunFolder, tmp_path: Path
) -> None:
    run = copy_run(gallery_run, tmp_path / "run")

    def rewind(data: Any) -> None:
        """To when it had made three steps and one evaluation, a moment ago."""
        data["chunks"] = data["chunks"][:1]
        data["evaluations"] = data["evaluations"][:1]
        # Steps of a second: it is looked at every two.
        data.update(recorded=time.time(), seconds_per_step=1, seconds_left=4440)

    def go_on(data: Any) -> None:
        """Steps 4 to 12, of which step 12 is stored, and an evaluation."""
        data["chunks"].append({"key": "steps-000011", "steps": [12]})
        data["evaluations"].append({"step": 6, "key": "evaluation-000006"})
        data["recorded"] = time.time()

    change_data(run, "run", rewind)
    page = open_gallery("groups?step=2", run=run, allows=NOT_FOUND)
    head = page.get_by_role("banner")
    expect(head).to_contain_text("step 3 of 40, about 1 h 14 min left")
    show(page, "progress")
    heads = page.locator(".progress-table thead th")
    expect(heads).to_have_count(3)
    row = page.locator(".row-id").first.element_handle()
    change_data(run, "run", go_on)
    expect(heads).to_have_count(4)
    # The table is the same one: what has the focus, and what was scrolled to, stays.
    assert row is not None
    assert row.evaluate("row => row.isConnected")
    show(page, "groups?step=2")
    choice = page.get_by_label("Training step")
    expect(choice).to_have_value("2")
    expect(choice.get_by_role("option", name="12")).to_be_attached()
    # What it has stays where the run can no longer be read.
    (run.gallery_path.parent / "data" / "run.js").unlink()
    expect(head).to_contain_text("Cannot read data/run.js now")
    expect(choice).to_have_value("2")
