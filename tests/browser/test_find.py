"""The Find view: every image in one grid, filtered, sorted, stepped through."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlencode

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

from glm_grpo.run.folder import RunFolder
from glm_grpo.studio.gallery import write_gallery
from rewards.canaries import Band, find_departures
from tests.browser.conftest import NOT_FOUND, OpenGallery, show, wait_until_loaded

# `gallery_run` has steps 1, 2, 3 and 12 of the prompts plain, masked, flat and hostile, three
# samples each; see tests/browser/conftest.py for their scores.
ALL = 4 * 4 * 3
MANY_STEPS = 120
MANY_GROUPS = 4
MANY_IMAGES = 8
MANY = MANY_STEPS * MANY_GROUPS * MANY_IMAGES


def fragment(**params: object) -> str:
    """Address of the view; a double underscore stands for a dot."""
    named = {name.replace("__", "."): value for name, value in params.items()}
    return f"find?{urlencode(named)}"


def cells_of(page: Page) -> Locator:
    return page.locator(".find-grid li")


def read_cells(page: Page) -> list[str]:
    """What stands below the shown pictures, from the first: value and step."""
    cells_of(page).first.wait_for()
    return page.locator(".find-grid li > span:nth-of-type(1)").all_inner_texts()


def expect_count(page: Page, found: int, of: int = ALL) -> None:
    expect(page.locator(".find-count")).to_have_text(f"{found:,} of {of:,} images")


@pytest.fixture
def open_find(open_gallery: OpenGallery) -> OpenGallery:
    """`open_gallery` for runs that lack pictures, as both runs here do."""
    return partial(open_gallery, allows=NOT_FOUND)


def test_find_filters_and_sorts_by_what_the_address_says(
    open_find: OpenGallery,
) -> None:
    table: tuple[tuple[dict[str, object], int], ...] = (
        # As text, not as a pattern, and whatever the case: `plain` and `masked` have quotes.
        ({"text": 'WORD "'}, 2 * 12),
        ({"id": "fla"}, 0),
        ({"from": 2, "to": 3}, 2 * 12),
        ({"flat": 1}, 12),
        ({"masked": 1}, 12),
        # One of `plain`, `masked` and `hostile` in each step; `flat` has none.
        ({"best": 1}, 4 * 3),
        # lpips: 1, 0.25 and 1 of plain, 1, 0.75 and 0.5 of hostile, 0.5 of flat; masked has none.
        ({"min__raw__lpips": 0.5, "max__raw__lpips": 0.75}, 4 * (3 + 2)),
        # Totals: 0.5, 0.25, 0.625; 0, 0.75, 0.375; 3 times 0.375; 0.5, 0.375, 0.25.
        ({"min__total": 0.5}, 4 * 4),
        ({"min__total": 0.375, "max__total": 0.375, "flat": 1}, 12),
        # Of each varied group the samples above its mean; `hostile` and `masked` have one at it.
        ({"min__advantage": 0.001}, 4 * (2 + 1 + 1)),
        # Read of `masked`: DOG, D0G, DOG; of `plain` CXT, nothing and CAT.
        ({"read": "d0"}, 4),
        # What is no number is no bound; without bands no canary is judged.
        ({"from": "x", "min__total": "x", "canary": "any"}, ALL),
    )
    page = open_find("find")
    expect(page.get_by_label("Canary outside its band")).to_have_count(0)
    for params, found in table:
        show(page, fragment(**params))
        expect_count(page, found)
    # Three evaluations of four prompts, two samples each.
    show(page, fragment(of="evaluations"))
    expect_count(page, 24, of=24)
    page.keyboard.press("n")
    link = page.locator(".find-chosen a")
    expect(link).to_have_attribute("href", "#progress?step=0&prompt=plain&sample=0")

    show(page, fragment(to=1))
    page.get_by_label("Sort by").select_option("Total")
    expect(page.get_by_role("button", name="Highest first")).to_be_visible()
    falling = ["0.750", "0.625", "0.500", "0.500", "0.375", "0.375", "0.375", "0.375", "0.375"]
    totals = [text.split()[0] for text in read_cells(page)]
    assert totals == [*falling, "0.250", "0.250", "0.000"]
    page.get_by_role("button", name="Highest first").click()
    expect(cells_of(page).first).to_contain_text("0.000")
    page.wait_for_url(re.compile(r"sort=total&order=asc"))
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
    expect_count(page, 12)
    page.get_by_label("Best of its group").check()
    expect_count(page, 4)
    page.get_by_role("group", name="ocr").get_by_label("at least").fill("0.25")
    expect_count(page, 4)
    page.get_by_role("group", name="ocr").get_by_label("at least").fill("0.75")
    expect(page.locator("main")).to_contain_text("None of the 48 images matches all filters")
    page.wait_for_url(re.compile(r"text=sign&best=1&min\.raw\.ocr=0\.75"))
    page.reload()
    expect_count(page, 0)
    expect(page.get_by_role("group", name="ocr").get_by_label("at least")).to_have_value("0.75")
    page.get_by_role("button", name="Clear filters").click()
    expect_count(page, ALL)
    page.wait_for_url(re.compile(r"#find$"))
    # A range of scores is dragged over its histogram, too.
    lpips = page.get_by_role("group", name="lpips")
    # Scores of 0.25, 0.5, 0.75 and 1, each in the part that begins there.
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
    expect(page.get_by_role("button", name="Filters (2)")).to_be_visible()

    show(page, fragment(to=1, sort="total", order="desc"))
    chosen = page.locator("li[aria-current=true]")
    expect(cells_of(page)).to_have_count(12)
    expect(chosen).to_have_count(0)
    for key, place in (("n", "1"), ("n", "2"), ("n", "3"), ("p", "2")):
        page.keyboard.press(key)
        expect(chosen).to_have_attribute("aria-posinset", place)
    # plain has the second highest total in its sample 2.
    expect(page.locator(".find-chosen")).to_contain_text("step 1, prompt plain, sample 2")
    page.get_by_role("region", name="Images found").focus()
    page.keyboard.press("ArrowRight")
    expect(chosen).to_have_attribute("aria-posinset", "3")
    page.keyboard.press("ArrowLeft")
    # In a field a letter is a letter.
    page.get_by_role("searchbox", name="Prompt ID").press("n")
    expect_count(page, 0)
    page.get_by_role("searchbox", name="Prompt ID").fill("")
    page.wait_for_url(re.compile(r"at=step-000001%2Fplain-2\.png$"))
    page.reload()
    wait_until_loaded(page)
    expect(chosen).to_have_attribute("aria-posinset", "2")
    page.keyboard.press("o")
    page.wait_for_url(re.compile(r"#groups\?step=1&prompt=plain&sample=2$"))
    page.go_back()
    page.get_by_role("region", name="Images found").focus()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"#groups\?step=1&prompt=plain&sample=2$"))


BANDS = {
    "edge_density": Band(mean=0.08, std=0.01, prompts=40),
    # A std below the floor of 1e-3 counts as 1e-3.
    "token_entropy": Band(mean=0.5, std=0.0, prompts=40),
    "aesthetic": Band(mean=0.5, std=0.1, prompts=40),
}
MARGIN = 3.0


def canary_metrics(step: int) -> dict[str, float | None]:
    """Values that go out of the bands at different steps, come back, and are missing at one."""
    edges = 0.08 if step == MANY_STEPS else 0.08 + 0.001 * step
    return {
        "canary/edge_density": edges,
        "canary/token_entropy": 0.5 - 0.0001 * step,
        "canary/aesthetic": None if step == 17 else 0.5 + 0.01 * step,
    }


def make_group(step: int, row: int, generator: torch.Generator) -> dict[str, Any]:
    ocr = torch.rand(MANY_IMAGES, generator=generator).tolist()
    # In every second step aesthetic applies to one prompt alone.
    applies = row == 0 or step % 2 == 0
    name = f"w{(step * MANY_GROUPS + row) % 97}"
    return {
        "prompt_id": name,
        "prompt": f'a sign with the word "{name}"',
        "texts": [name],
        "target": None,
        "decode_seed": "1",
        "images": [f"step-{step:06d}/{name}-{sample}.png" for sample in range(MANY_IMAGES)],
        "raw": {"ocr": ocr, "aesthetic": [0.5] * MANY_IMAGES if applies else None},
        "notes": {},
        "total": ocr,
        "penalty": [0.0] * MANY_IMAGES,
        "advantage": ocr,
        "is_flat": False,
    }


def write_data(folder: RunFolder, key: str, data: Mapping[str, Any]) -> None:
    path = folder.gallery_path.parent / "data" / f"{key}.js"
    path.write_text(f"glmGallery.receive({json.dumps(key)}, {json.dumps(data)});")


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The gallery alone of a run with canaries and 3,840 images, none of which is there."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "large")
    folder.path.mkdir()
    write_gallery(folder, ())
    generator = torch.Generator().manual_seed(0)
    chunks = []
    for first in range(1, MANY_STEPS + 1, 10):
        numbers = range(first, first + 10)
        steps = [
            {
                "step": step,
                "groups": [make_group(step, row, generator) for row in range(MANY_GROUPS)],
            }
            for step in numbers
        ]
        metrics = [{"step": step, **canary_metrics(step)} for step in numbers]
        key = f"steps-{first:06d}"
        chunks.append({"key": key, "steps": list(numbers)})
        write_data(folder, key, {"metrics": metrics, "steps": steps})
    terms = [
        {"name": "ocr", "kind": "ocr", "weight": 1.0, "std_floor": 1e-4},
        {"name": "aesthetic", "kind": "aesthetic", "weight": 0.0, "std_floor": 1e-4},
    ]
    run = {
        "schema": 2,
        "name": "large",
        "reward": {"combine": "weighted_sum", "terms": terms, "watch": ["aesthetic"]},
        "advantage": {"normalization": "group_std", "std_floor": 0.02, "clip": None},
        "group_size": MANY_IMAGES,
        "picture": {"width": 64, "height": 64},
        "steps_planned": MANY_STEPS,
        "is_sampled": True,
        "evaluations": [],
        "chunks": chunks,
        "bands": {name: asdict(band) for name, band in BANDS.items()},
        "canary_margin": MARGIN,
        "config": None,
        "problems": [],
    }
    write_data(folder, "run", run)
    return folder


def find_departed(step: int) -> set[str]:
    """As the run itself judges: one value a prompt, NaN where a term does not apply."""
    values = {}
    for name in BANDS:
        value = canary_metrics(step)[f"canary/{name}"]
        column = torch.full((MANY_GROUPS,), math.nan if value is None else value).double()
        if name == "aesthetic" and step % 2 == 1:
            column[1:] = math.nan
        values[name] = column
    return {departure.name for departure in find_departures(BANDS, values, MARGIN)}


def test_find_takes_thousands_of_images_and_steps_where_a_canary_left_its_band(
    open_find: OpenGallery,
    large_run: RunFolder,
) -> None:
    page = open_find("find", run=large_run)
    expect_count(page, MANY, of=MANY)
    region = page.get_by_role("region", name="Images found")
    expect(cells_of(page).first).to_have_attribute("aria-setsize", str(MANY))
    assert cells_of(page).count() < 120
    region.evaluate("region => { region.scrollTop = region.scrollHeight; }")
    expect(cells_of(page).last).to_have_attribute("aria-posinset", str(MANY))
    assert cells_of(page).count() < 120
    assert read_cells(page)[-1].split()[-1] == str(MANY_STEPS)
    # Another order starts at its top.
    page.get_by_label("Sort by").select_option("ocr")
    expect(cells_of(page).first).to_have_attribute("aria-posinset", "1")
    scores = [float(text.split()[1]) for text in read_cells(page)]
    assert scores == sorted(scores, reverse=True)

    departed = {step: find_departed(step) for step in range(1, MANY_STEPS + 1)}
    for canary in ("any", *BANDS):
        steps = [
            step
            for step, names in departed.items()
            if names & ({*BANDS} if canary == "any" else {canary})
        ]
        # Some, not all, and for aesthetic not simply those after the first.
        assert 0 < len(steps) < MANY_STEPS
        show(page, fragment(canary=canary))
        expect_count(page, len(steps) * MANY_GROUPS * MANY_IMAGES, of=MANY)
        assert read_cells(page)[0].split()[-1] == str(steps[0])
    show(page, "start")
    state = page.get_by_role("region", name="Canaries")
    last = departed[MANY_STEPS]
    assert 0 < len(last) < len(BANDS)
    expect(state).to_contain_text(f"{len(last)} of 3 outside their band at step {MANY_STEPS}")
    outside = state.locator("tbody tr", has_text="outside")
    expect(outside.locator("th")).to_have_text([name for name in BANDS if name in last])
