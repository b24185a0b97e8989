"""What all views share: keys and addresses, text that is markup, what is missing."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import expect

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import SummaryRow
from glm_grpo.studio.gallery import write_gallery
from rewards.canaries import Band
from tests.browser.conftest import (
    HOSTILE,
    NOT_FOUND,
    OpenGallery,
    change_data,
    copy_run,
    show,
)

VIEWS = (
    "start",
    "progress",
    "groups?step=1",
    "weights",
    "curves",
    "find",
    f"groups?{urlencode({'step': 1, 'prompt': HOSTILE, 'sample': 0, 'large': 1})}",
)
MARKUP = "<img src=x onerror=\"document.title='taken over'\">"


def test_a_reader_goes_through_views_by_keys_links_and_wrong_addresses(
    open_gallery: OpenGallery,
) -> None:
    page = open_gallery()
    name = page.locator("h1").inner_text()
    expect(page).to_have_title(f"Start: {name}")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Start", exact=True)).to_be_focused()
    navigation = page.get_by_role("navigation")
    navigation.get_by_role("link", name="Groups").click()
    expect(page.get_by_role("heading", name="Groups")).to_be_focused()
    expect(navigation.locator("[aria-current=page]")).to_have_text("Groups")
    expect(page).to_have_title(f"Groups: {name}")

    show(page, "groups?step=99")
    expect(page.locator("main .problem")).to_contain_text('no training step "99"')
    page.get_by_role("link", name="step 13").click()
    # The table of this step is torn.
    expect(page.locator("main .problem")).to_contain_text("step-000013.parquet")
    show(page, "progress?prompt=plain&step=7&sample=0")
    page.get_by_role("link", name="step 6").click()
    expect(page.locator(".is-pinned")).to_have_count(1)
    page.evaluate("location.hash = '#grups'")
    expect(page.get_by_role("heading", name="Unknown view")).to_be_visible()

    show(page, "groups?step=2")
    difference = page.get_by_label("Difference from target")
    difference.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_label("Training step")).to_have_value("1")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Next and previous prompt")
    page.keyboard.press("Escape")
    expect(difference).to_be_focused()
    page.keyboard.press("5")
    expect(page.get_by_role("heading", level=2)).to_have_text("Curves")
    # In a field a letter is a letter.
    page.get_by_role("searchbox", name="Metric").press("4")
    expect(page.get_by_role("searchbox", name="Metric")).to_have_value("4")
    page.get_by_role("button", name="Keys", exact=True).click()
    dialog.get_by_label("Use single-character shortcuts").uncheck()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.keyboard.press("3")
    expect(page.get_by_role("heading", level=2)).to_have_text("Curves")


@pytest.fixture
def hostile_run(gallery_run: RunFolder, tmp_path: Path) -> RunFolder:
    """A run in which every text that someone can choose is markup: prompts and their names, notes,
    terms, metrics, canaries, name, tags."""
    run = copy_run(gallery_run, tmp_path / "run")
    run.canaries_path.write_text(json.dumps({MARKUP: asdict(Band(0.5, 0.1, 4))}))
    with run.metrics_path.open("a") as file:
        metrics = {MARKUP: 1.0, f"reward/{MARKUP}/mean": 0.5, f"canary/{MARKUP}": 0.9}
        file.write(f"{json.dumps({'step': 14, **metrics})}\n")
    write_gallery(run, [SummaryRow(MARKUP, 0.25, 0.5, 0.25, 0.125, 0.375)])
    for path in (run.gallery_path.parent / "data").iterdir():
        text = path.read_text(encoding="utf-8").replace('"ocr"', json.dumps(MARKUP))
        named = text.replace(f'"kind":{json.dumps(MARKUP)}', '"kind":"ocr"')
        path.write_text(named, encoding="utf-8")
    said = {"name": MARKUP, "notes": MARKUP, "tags": [MARKUP]}
    change_data(run, "run", lambda data: data.update(label=said))
    return run


def test_text_that_is_markup_stays_text_in_every_view(
    open_gallery: OpenGallery, hostile_run: RunFolder
) -> None:
    size = {"width": 390, "height": 844}
    page = open_gallery("start", run=hostile_run, allows=NOT_FOUND, viewport=size)
    for fragment in VIEWS:
        show(page, fragment)
        # However long a name or a reading is.
        assert page.evaluate("document.documentElement.scrollWidth") == 390, fragment
        # The name of a term, a metric, a prompt, or a note.
        expect(page.locator("main, dialog").last).to_contain_text("onerror=")
        expect(page.locator("img[src=x]")).to_have_count(0)
        expect(page.locator("#app script")).to_have_count(0)
        assert "taken over" not in page.title()
    show(page, "groups?step=1")
    group = page.locator(".group").last
    expect(group.get_by_text(HOSTILE, exact=True).first).to_be_visible()
    # Its name has an address all the same.
    group.get_by_role("button", name=re.compile("^<script>.*sample 0", re.DOTALL)).first.click()
    expect(page).to_have_url(re.compile("large=1$"))
    page.reload()
    expect(page.get_by_role("dialog").get_by_role("heading")).to_contain_text("<script>")
    assert page.evaluate("glmGallery.route().params.prompt") == HOSTILE


def test_what_is_missing_is_said_in_its_place_and_the_rest_works(
    open_gallery: OpenGallery, gallery_run: RunFolder, empty_run: RunFolder, tmp_path: Path
) -> None:
    run = copy_run(gallery_run, tmp_path / "run")
    gallery = run.gallery_path.parent
    (run.image_dir(1) / "plain-0.png").unlink()
    page = open_gallery("groups?step=3", run=run, allows=NOT_FOUND, throws=True)
    samples = page.locator(".group").first.locator("li.sample")
    expect(samples.nth(2)).to_contain_text("image missing")
    expect(samples.nth(0)).not_to_contain_text("image missing")
    # A thumbnail stands in for the image it was made of.
    show(page, "groups?step=1&prompt=plain&sample=0&large=1")
    image = page.get_by_role("dialog").get_by_role("img", name="plain, sample 0", exact=False)
    expect(image.first).to_have_attribute("src", "thumbs/step-000001/plain-0.webp")
    page.keyboard.press("Escape")

    (gallery / "assets" / "groups.js").unlink()
    (gallery / "data" / "evaluation-000006.js").write_text("glmGallery.receive(", encoding="utf-8")
    page.reload()
    expect(page.get_by_role("banner")).to_contain_text("assets/groups.js: is missing or damaged")
    page.get_by_role("link", name="Progress").click()
    expect(page.locator("main .problem")).to_contain_text("data/evaluation-000006.js is missing")
    expect(page.locator(".cell-figures").first).to_be_visible()
    (gallery / "data" / "run.js").unlink()
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("This gallery cannot be shown")

    page = open_gallery(run=empty_run)
    for view, what in {
        "start": "No data yet",
        "progress": "No evaluation is stored",
        "groups": "No training step",
        "weights": "the run has not stored a training step yet",
        "curves": "No metrics are stored yet",
        "find": "0 of 0 images",
    }.items():
        show(page, view)
        expect(page.locator("main")).to_contain_text(what)
