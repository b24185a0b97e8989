"""The Find view: every image in one grid, filtered, sorted, stepped through."""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlencode

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

from glm_grpo.run.folder import RunFolder
from rewards.canaries import Band, find_departures
from tests.browser.conftest import (
    NOT_FOUND,
    OpenGallery,
    change_data,
    copy_run,
    show,
    wait_until_loaded,
)

# `gallery_run` has steps 1, 2, 3 and 12 of the prompts plain, masked, flat and hostile, three
# samples each; see tests/browser/conftest.py for their scores.
ALL = 4 * 4 * 3
MANY_STEPS = 300
MANY = MANY_STEPS * 4 * 3


def fragment(**params: object) -> str:
    """Address of the view; a double underscore stands for a dot."""
    named = {name.replace("__", "."): value for name, value in params.items()}
    return f"find?{urlencode(named)}"


def cells_of(page: Page) -> Locator:
    return page.locator(".find-grid li")


def read_cells(page: Page) -> list[str]:
    """What stands below the shown images, from the first: value and step."""
    cells_of(page).first.wait_for()
    return page.locator(".find-grid li > span:nth-of-type(1)").all_inner_texts()


def expect_count(page: Page, found: int, of: int = ALL) -> None:
    expect(page.locator(".find-count")).to_have_text(f"{found:,} of {of:,} images")


@pytest.fixture
def open_find(open_gallery: OpenGallery) -> OpenGallery:
    """`open_gallery` for runs that lack images, as both runs here do."""
    return partial(open_gallery, allows=NOT_FOUND)


def test_find_filters_and_sorts_by_what_the_address_says(open_find: OpenGallery) -> None:
    table: tuple[tuple[dict[str, object], int], ...] = (
        # As text, not as a pattern, and whatever the case: `plain` and `masked` have quotes.
        ({"text": 'WORD "'}, 2 * 12),
        ({"from": 2, "to": 3}, 2 * 12),
        ({"zero_std": 1}, 12),
        ({"masked": 1}, 12),
        # One of `plain`, `masked` and `hostile` in each step; `flat` has none.
        ({"best": 1}, 4 * 3),
        # lpips: 1, 0.25 and 1 of plain, 1, 0.75 and 0.5 of hostile, 0.5 of flat; masked has none.
        ({"min__raw__lpips": 0.5, "max__raw__lpips": 0.75}, 4 * (3 + 2)),
        # Totals: 0.5, 0.25, 0.625; 0, 0.75, 0.375; 3 times 0.375; 0.5, 0.375, 0.25.
        ({"min__total": 0.5}, 4 * 4),
        # Of each varied group the samples above its mean; `hostile` and `masked` have one at it.
        ({"min__advantage": 0.001}, 4 * (2 + 1 + 1)),
        # Read of `masked`: DOG, XO, DOG; of `plain` CXT, nothing and CAT.
        ({"read": "xo"}, 4),
        # What is no number is no bound; without bands no canary is judged.
        ({"from": "x", "min__total": "x", "canary": "any"}, ALL),
    )
    page = open_find("find")
    for params, found in table:
        show(page, fragment(**params))
        expect_count(page, found)
    # Three evaluations of four prompts, two samples each.
    show(page, fragment(of="evaluations"))
    expect_count(page, 24, of=24)

    show(page, fragment(to=1))
    page.get_by_label("Sort by").select_option("Total")
    falling = ["0.750", "0.625", "0.500", "0.500", "0.375", "0.375", "0.375", "0.375", "0.375"]
    page.wait_for_url(re.compile("sort=total"))
    totals = [text.split()[0] for text in read_cells(page)]
    assert totals == [*falling, "0.250", "0.250", "0.000"]
    # What has no score comes last, either way.
    for order in ("asc", "desc"):
        show(page, fragment(to=1, sort="raw.lpips", order=order))
        scores = [text.split()[1] for text in read_cells(page)]
        assert scores[9:] == ["none"] * 3
        assert scores[:9] == sorted(scores[:9], reverse=order == "desc")


def test_find_filters_as_fields_are_filled_and_steps_through_by_keys(
    open_find: OpenGallery,
) -> None:
    page = open_find("find")
    page.get_by_label("Prompt contains").fill("sign")
    page.get_by_label("Best of its group").check()
    expect_count(page, 4)
    page.get_by_role("group", name="ocr").get_by_label("at least").fill("0.75")
    expect(page.locator("main")).to_contain_text("None of the 48 images matches all filters")
    page.wait_for_url(re.compile(r"text=sign&best=1&min\.raw\.ocr=0\.75"))
    page.reload()
    expect_count(page, 0)
    page.get_by_role("button", name="Clear filters").click()
    expect_count(page, ALL)
    # A range of scores is dragged over its histogram, too: of 0.25, 0.5, 0.75 and 1.
    lpips = page.get_by_role("group", name="lpips")
    box = lpips.locator("svg").bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.2 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], y)
    page.mouse.up()
    # Of `flat` all three, of `hostile` two, in each step.
    expect_count(page, 4 * (3 + 2))
    expect(lpips.get_by_label("at least")).to_have_value("0.375")

    show(page, fragment(to=1, sort="total", order="desc"))
    chosen = page.locator("li[aria-current=true]")
    expect(cells_of(page)).to_have_count(12)
    for key, place in (("n", "1"), ("n", "2"), ("n", "3"), ("p", "2")):
        page.keyboard.press(key)
        expect(chosen).to_have_attribute("aria-posinset", place)
    # plain has the second highest total in its sample 2.
    expect(page.locator(".find-chosen")).to_contain_text("step 1, prompt plain, sample 2")
    page.wait_for_url(re.compile(r"at=step-000001%2Fplain-2\.png$"))
    page.reload()
    wait_until_loaded(page)
    expect(chosen).to_have_attribute("aria-posinset", "2")
    page.keyboard.press("o")
    page.wait_for_url(re.compile(r"#groups\?step=1&prompt=plain&sample=2$"))


BANDS = {
    "edge_density": Band(mean=0.08, std=0.01, prompts=40),
    # A std below the floor of 1e-3 counts as 1e-3.
    "token_entropy": Band(mean=0.5, std=0.0, prompts=40),
}
MARGIN = 3.0


def canary_metrics(step: int) -> dict[str, float]:
    """Values that go out of the bands at different steps, of which one comes back."""
    edges = 0.08 if step == MANY_STEPS else 0.08 + 0.001 * step
    return {"canary/edge_density": edges, "canary/token_entropy": 0.5 - 0.0001 * step}


@pytest.fixture(scope="module")
def large_run(gallery_run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Step 1 of the common run, over and over, with canaries."""
    folder = copy_run(gallery_run, tmp_path_factory.mktemp("runs") / "large")
    chunks: list[dict[str, Any]] = []

    def repeat(chunk: dict[str, Any]) -> None:
        (first, *_), numbers = chunk["steps"], range(1, MANY_STEPS + 1)
        chunk["steps"] = [{**first, "step": step} for step in numbers]
        chunk["metrics"] = [{"step": step, **canary_metrics(step)} for step in numbers]
        chunks.append({"key": "steps-000001", "steps": [*numbers]})

    change_data(folder, "steps-000001", repeat)
    bands = {name: asdict(band) for name, band in BANDS.items()}
    changes = {"chunks": chunks, "evaluations": [], "bands": bands, "canary_margin": MARGIN}
    change_data(folder, "run", lambda data: data.update(changes))
    return folder


def find_departed(step: int) -> set[str]:
    """As the run itself judges: one value a prompt."""
    values = {
        name: torch.full((4,), canary_metrics(step)[f"canary/{name}"]).double() for name in BANDS
    }
    return {departure.name for departure in find_departures(BANDS, values, MARGIN)}


def test_find_takes_thousands_of_images_and_steps_where_a_canary_left_its_band(
    open_find: OpenGallery, large_run: RunFolder
) -> None:
    page = open_find("find", run=large_run)
    expect_count(page, MANY, of=MANY)
    region = page.get_by_role("region", name="Images found")
    expect(cells_of(page).first).to_have_attribute("aria-setsize", str(MANY))
    assert cells_of(page).count() < 120
    region.evaluate("region => { region.scrollTop = region.scrollHeight; }")
    expect(cells_of(page).last).to_have_attribute("aria-posinset", str(MANY))
    assert cells_of(page).count() < 120
    # Another order starts at its top.
    page.get_by_label("Sort by").select_option("ocr")
    expect(cells_of(page).first).to_have_attribute("aria-posinset", "1")

    departed = {step: find_departed(step) for step in range(1, MANY_STEPS + 1)}
    for canary in ("any", *BANDS):
        steps = [
            step
            for step, names in departed.items()
            if names & ({*BANDS} if canary == "any" else {canary})
        ]
        assert 0 < len(steps) < MANY_STEPS
        show(page, fragment(canary=canary))
        expect_count(page, len(steps) * 12, of=MANY)
        assert read_cells(page)[0].split()[-1] == str(steps[0])
    show(page, "start")
    state = page.get_by_role("region", name="Canaries")
    expect(state).to_contain_text(f"1 of 2 outside their band at step {MANY_STEPS}")
