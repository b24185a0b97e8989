"""Stars, rejections and notes: made by hand, kept, found again, and taken away as files."""

from __future__ import annotations

import csv
import json
import re
import shutil
import threading
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from glm_grpo.data.prompts import load_prompts
from glm_grpo.gallery.server import GalleryServer
from glm_grpo.run.folder import RunFolder
from tests.browser.conftest import NOT_FOUND, SIDE, TIMEOUT, OpenGallery, copy_run


def download(page: Page, button: str) -> str:
    with page.expect_download() as event:
        page.get_by_role("button", name=button).click()
    return event.value.path().read_text(encoding="utf-8")


def test_marks_from_disk_stay_in_the_browser_and_leave_as_files(
    open_gallery: OpenGallery, gallery_run: RunFolder, tmp_path: Path
) -> None:
    page = open_gallery("groups?step=1", allows=NOT_FOUND)
    page.get_by_role("button", name="Star plain, sample 2").click()
    page.get_by_role("button", name="Reject masked, sample 1").click()
    page.get_by_role("button", name="Note on plain, sample 2").click()
    note = page.get_by_role("textbox", name="Note on plain, sample 2")
    expect(note).to_be_focused()
    note.fill("=1+1, <b>")
    note.press("Enter")
    expect(page.get_by_role("button", name="Note on plain, sample 2")).to_be_focused()
    # By key, in the large view, where Escape first leaves the field.
    page.evaluate("location.hash = '#groups?step=2&prompt=plain&sample=0&large=1'")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    page.keyboard.press("t")
    star = dialog.get_by_role("button", name="Star plain, sample 0")
    expect(star).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("m")
    dialog.get_by_role("textbox").fill("kept")
    page.keyboard.press("Escape")
    expect(dialog.locator(".mark-note")).to_have_text("kept")
    # A key right after the picture has changed is not lost, and what is typed marks nothing.
    for key in ("ArrowRight", "m", "t", "x", "Enter", "ArrowLeft", "m"):
        page.keyboard.press(key)
    expect(dialog.get_by_role("textbox")).to_have_value("kept")
    # The field goes with its focus: else keys would be the page's while it still stands there.
    dialog.locator(".large-stage").click(position={"x": 5, "y": 5})
    expect(dialog.get_by_role("textbox")).to_have_count(0)
    page.evaluate("location.hash = '#marks'")
    page.reload()
    expect(page.locator("p[role=status]")).to_have_text(
        re.compile("4 marked: 2 starred, 1 rejected, 1 noted.")
    )
    rows = list(csv.DictReader(download(page, "All marks as CSV").splitlines()))
    shown = [
        (row["mark"], row["step"], row["prompt_id"], row["sample"], row["read"]) for row in rows
    ]
    assert shown == [
        ("star", "1", "plain", "2", "CAT"),
        ("reject", "1", "masked", "1", "D0G"),
        ("star", "2", "plain", "0", "CXT"),
        ("", "2", "plain", "1", ""),
    ]
    # Nothing that a program for tables would compute.
    assert rows[0]["note"] == "'=1+1, <b>"
    assert rows[0]["image"] == "images/step-000001/plain-2.png"
    assert [rows[1]["lpips"], rows[1]["ocr"], rows[1]["total"]] == ["", "1", "0.75"]
    # What was starred is a prompt file, beside the pictures that it names.
    run = tmp_path / "run"
    shutil.copytree(gallery_run.images_dir, run / "images")
    prompts = run / "starred.jsonl"
    prompts.write_text(download(page, "Prompts of starred images"), encoding="utf-8")
    (prompt,) = load_prompts(str(prompts), height=SIDE, width=SIDE)
    assert (prompt.prompt_id, prompt.texts) == ("plain", ("CAT",))
    assert prompt.target is not None
    assert prompt.target.flatten()[0] == 80


def test_find_marks_the_chosen_image_by_key_and_filters_by_marks(open_gallery: OpenGallery) -> None:
    page = open_gallery("find?of=evaluations", allows=NOT_FOUND)
    for _ in range(2):
        page.keyboard.press("n")
    page.keyboard.press("x")
    expect(page.locator(".find-grid [aria-current] .mark-sign.is-reject")).to_be_visible()
    page.get_by_label("Marks").select_option("rejected")
    expect(page.locator(".find-count")).to_have_text("1 of 24 images")
    page.keyboard.press("x")
    expect(page.locator("main")).to_contain_text("None of the 24 images matches all filters")
    page.get_by_role("button", name="Show all images").click()
    expect(page.locator(".find-count")).to_have_text("24 of 24 images")


def test_marks_of_a_served_gallery_are_stored_beside_the_run(
    browser: Browser, gallery_run: RunFolder, tmp_path: Path
) -> None:
    run = copy_run(gallery_run, tmp_path / "run")
    image = "step-000001/plain-2.png"
    run.marks_path.write_text(json.dumps({image: {"verdict": "reject", "note": ""}}))
    complaints: list[str] = []
    with GalleryServer(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            page = browser.new_page()
            page.set_default_timeout(TIMEOUT)
            page.on("console", lambda message: complaints.append(message.text))
            page.goto(f"{server.url}#groups?step=1")
            star = page.get_by_role("button", name="Star plain, sample 2")
            reject = page.get_by_role("button", name="Reject plain, sample 2")
            # As it is now, not as it was when the pages were written.
            expect(reject).to_have_attribute("aria-pressed", "true")
            with page.expect_response("**/marks.json"):
                star.click()
            assert json.loads(run.marks_path.read_text())[image]["verdict"] == "star"
            run.marks_path.write_text("{")
            star.click()
            # What could not be stored is not shown as if it were.
            expect(star).to_have_attribute("aria-pressed", "true")
            page.goto(f"{server.url}#marks")
            page.reload()
            expect(page.get_by_role("alert")).to_contain_text("marks.json cannot be read")
            page.close()
        finally:
            server.shutdown()
            thread.join()
    assert [text for text in complaints if "Failed to load resource" not in text] == []
