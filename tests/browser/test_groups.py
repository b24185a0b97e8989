"""The Groups view, as a reader meets it. The numbers are those of `RAW` in conftest.py."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from playwright.sync_api import Locator, Page, expect

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import CREDIT, METADATA, NOTE, OBJECTS, PIECES, read_table
from glm_grpo.studio.gallery import write_gallery
from tests.browser.conftest import (
    GROUP_SIZE,
    NOT_FOUND,
    SIDE,
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


def test_groups_show_samples_by_reward_with_all_that_is_known_of_them(
    open_gallery: OpenGallery,
) -> None:
    page = open_gallery("groups?step=1", allows=NOT_FOUND)
    headings = group_of(page, "plain").locator("li h4")
    expect(headings).to_have_text(["Rank 1 sample 2", "Rank 2 sample 0", "Rank 3 sample 1"])
    headings = group_of(page, "flat").locator("li h4")
    expect(headings).to_have_text(["Rank 1 sample 0", "Rank 1 sample 1", "Rank 1 sample 2"])
    samples = samples_of(page, "plain")
    expect_cells(
        samples.first.locator(".scores tr"),
        [["Term", "Score"], ["lpips", "1.000"], ["ocr", "0.500"], ["Total", "0.625"]],
    )
    # The bar of the best is the longest of the group: 0.5 / 0.625 and 0.125 / 0.625 of its width.
    ends = samples.first.locator(".bar:not(.advantage) .piece").evaluate_all(
        "all => all.map((piece) => [piece.style.left, piece.style.width])"
    )
    assert ends == [["0%", "80%"], ["80%", "20%"]]
    # (0.625, 0.5, 0.25) less their mean 0.458333, over their standard deviation 0.190941.
    expect(samples.locator(".line strong")).to_have_text(["+0.873", "+0.218", "\u22121.091"])
    # In order of reward: what was read of samples 2, 0 and 1.
    for index, wrong in enumerate(([], ["X"], [])):
        expect(samples.nth(index).locator(".asked-read mark")).to_have_text(wrong)
    expect(samples.nth(1).locator(".asked-read")).to_have_text(
        re.compile(r"^asked CAT, read CXT\b")
    )
    expect(samples.nth(2).locator(".note")).to_have_text("nothing")

    page.keyboard.press("d")
    expect(page).to_have_url(re.compile(r"#groups\?step=1&diff=1$"))
    layers = samples.first.locator(".difference img")
    expect(layers).to_have_count(2)
    assert layers.last.evaluate("layer => getComputedStyle(layer).mixBlendMode") == "difference"
    page.keyboard.press("d")
    expect(page.locator(".difference")).to_have_count(0)

    expect(page.locator("p[role=status]")).to_contain_text("1 zero-std group.")
    masked = group_of(page, "masked")
    expect(masked).to_contain_text("Terms that do not apply here: lpips")
    # A letter that is read nowhere is named beside the wrong ones.
    marks = samples_of(page, "masked").first.locator(".asked-read mark")
    expect(marks).to_have_text(["X", "no G"])
    # What each term adds stands beside the image, enlarged: ocr takes over the weight of lpips.
    samples_of(page, "masked").first.get_by_role("button", name="masked, sample 1").first.click()
    part = page.get_by_role("dialog").get_by_role("row", name="ocr")
    expect(part.get_by_role("cell")).to_have_text(["1.000", "0.750"])
    page.keyboard.press("Escape")

    page.get_by_label("Show").select_option("Images")
    show(page, "groups?step=3")
    expect(page.get_by_label("Show")).to_have_value("images")
    page.keyboard.press("ArrowRight")
    expect(page.locator("p[role=status]")).to_contain_text("Step 12:")
    page.get_by_role("heading", name="Groups").focus()
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(masked.get_by_role("heading", level=3)).to_be_focused()
    page.keyboard.press("k")
    expect(group_of(page, "plain").get_by_role("heading", level=3)).to_be_focused()


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
    show(page, "find?best=1&id=plain&to=1")
    expect(page.locator(".find-count")).to_have_text("2 of 48 images")


def test_an_image_that_a_term_refused_is_last_and_has_no_figures_anywhere(
    open_gallery: OpenGallery, gallery_run: RunFolder, tmp_path: Path
) -> None:
    def refuse(group: Any, sample: int) -> None:
        assert group["prompt_id"] == "plain"
        group["raw"]["ocr"][sample] = group["total"][sample] = None
        if "advantage" in group:
            group["advantage"][sample] = 0.0

    run = copy_run(gallery_run, tmp_path / "run")
    change_data(run, "steps-000001", lambda data: refuse(data["steps"][0]["groups"][0], 2))
    change_data(run, "evaluation-000012", lambda data: refuse(data["groups"][0], 0))
    page = open_gallery("groups?step=1", run=run, allows=NOT_FOUND)
    headings = group_of(page, "plain").locator("li h4")
    expect(headings).to_have_text(["Rank 1 sample 0", "Rank 2 sample 1", "Left out sample 2"])
    samples = samples_of(page, "plain")
    expect_cells(
        samples.last.locator(".scores tr"),
        [["Term", "Score"], ["lpips", "1.000"], ["ocr", "none"], ["Total", "none"]],
    )
    expect(group_of(page, "plain").locator(".problem")).to_have_count(0)
    # In no range, and not the best.
    show(page, "find?id=plain&to=1&max.total=0.3&from=1")
    expect(page.locator(".find-count")).to_have_text("1 of 48 images")
    # Of the two samples the other one rose, from 0.25 by 0.125.
    show(page, "progress")
    row = page.locator("tr", has_text="plain").first
    expect(row.locator(".row-change")).to_contain_text("0.375")
    show(page, "weights")
    expect(page.locator(".weights-group").first).to_be_visible()
    expect(page.locator("body")).not_to_contain_text("NaN")


def credit_run(run: RunFolder, path: Path) -> RunFolder:
    """A copy in which step 1 has credit on two by two places, and pieces, of `plain`."""
    run = copy_run(run, path)
    rollout = run.rollout_path(1)
    table = read_table(rollout)
    # Of samples 0, 1 and 2; the other groups have none.
    places = [[[0.25, 0], [0, -0.125]], [[-0.5, 0], [0, 0.125]], [[0.25, 0], [0, 0]]]
    credit = places + [[[0.0, 0.0], [0.0, 0.0]]] * 9
    edges = {"left": 16.0, "top": 32.0, "right": 32.0, "bottom": 48.0}
    found = [{"text": "C", "value": 0.25, **edges}, {"text": "<b>", "value": 0.0, **edges}]
    pieces = [found, [], [], *[[]] * 9]
    halves = [[[np.float16(value) for value in row] for row in image] for image in credit]
    table = table.append_column(
        CREDIT, pyarrow.array(halves, pyarrow.list_(pyarrow.list_(pyarrow.float16())))
    ).append_column(f"{PIECES}ocr", pyarrow.array(pieces))
    pyarrow.parquet.write_table(table, rollout)
    write_gallery(run, ())
    return run


def test_groups_find_and_the_large_view_lay_over_samples_what_their_places_earned(
    open_gallery: OpenGallery, gallery_run: RunFolder, tmp_path: Path, find_violations: Any
) -> None:
    run = credit_run(gallery_run, tmp_path / "run")
    page = open_gallery("groups?step=1", run=run, allows=NOT_FOUND)
    samples = samples_of(page, "plain")
    # Images are in colour until the reader asks for it; then the browser remembers it.
    expect(page.locator(".credit")).to_have_count(0)
    page.keyboard.press("c")
    expect(page).to_have_url(re.compile("credit=1"))
    show(page, "groups?step=2")
    samples_of(page, "plain")
    show(page, "groups?step=1")
    expect(group_of(page, "plain")).to_contain_text("strongest colour: \u00b10.500")
    expect(group_of(page, "flat")).to_contain_text("no place differs")
    # In order of reward: samples 2, 0 and 1.
    over = samples.locator(".credit")
    expect(over).to_have_count(GROUP_SIZE)
    pixels = over.locator("canvas").evaluate_all(
        "all => all.map((each) => [...each.getContext('2d').getImageData(0, 0, 2, 2).data])"
    )
    # The opacity of the largest is 0.85 * 255 = 216.75; of half of it 108, of a quarter 54.
    alphas = [image[3::4] for image in pixels]
    assert alphas == [[108, 0, 0, 0], [108, 0, 0, 54], [217, 0, 0, 54]]
    more, less = pixels[1][:3], pixels[2][:3]
    assert more[2] > more[0]
    assert less[0] > less[2]
    expect(over.nth(1).locator("canvas")).to_have_attribute(
        "aria-label",
        "Credit by place: most +0.250 in row 1, column 1; least \u22120.125 in row 2, column 2",
    )
    # Markup in a piece stays text. The piece lies at a quarter, half, of 64 pixels.
    expect(over.nth(1).locator(".is-dashed")).to_have_text(["<b>"])
    box = over.nth(1).locator(".credit-piece:not(.is-dashed)")
    assert box.evaluate("box => [box.style.left, box.style.top]") == ["25%", "50%"]

    over.nth(1).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".credit-numbers span")).to_have_text(
        ["+0.250", "0.000", "0.000", "\u22120.125"]
    )
    assert find_violations(page) == []
    page.keyboard.press("c")
    expect(dialog.locator(".credit")).to_have_count(0)
    show(page, "groups?step=1")
    samples_of(page, "plain")
    expect(page.locator(".credit")).to_have_count(0)

    show(page, "find?id=plain&to=1")
    page.locator(".find-region .image").first.click()
    dialog.get_by_role("button", name="Credit").click()
    expect(dialog.locator(".credit canvas")).to_have_count(1)


def objects_run(run: RunFolder, path: Path) -> RunFolder:
    """A copy in which `plain` asks for two red circles, and a term found things in step 1."""
    run = copy_run(run, path)
    rollout = run.rollout_path(1)
    table = read_table(rollout)

    def box(kind: str, value: float, left: float, text: str = "red circle .93") -> dict[str, Any]:
        edges = {"left": left, "top": 20.0, "right": left + 12.0, "bottom": 32.0}
        return {"text": text, "kind": kind, "value": value, **edges}

    # Of three circles beside each other two have a colour and a position each; each of these earns
    # 0.5 for its colour, and the one of sample 1 nothing.
    found = [box("colour:0", 0.5, left) for left in (12.0, 26.0)]
    found += [box("position:0-1", 0.25, left) for left in (12.0, 26.0)]
    found += [box("", 0.0, 40.0, "blue circle .91")]
    asked = {"include": [{"class": "circle", "count": 2, "color": "red"}]}
    columns = {
        METADATA: [json.dumps(asked)] * 3 + ["{}"] * 9,
        f"{OBJECTS}shapes": [["2 red circle", "1 more circle"], ["blue circle"], ["no circle"]]
        + [None] * 9,
        f"{NOTE}shapes": ["", "asked 2 circle, found 1", "asked 2 circle, found none"] + [None] * 9,
        f"{PIECES}shapes": [found, [box("colour:0", 0.0, 20.0)], *[[]] * 10],
    }
    places = [[[np.float16(0.0)]]] * 12
    table = table.append_column(
        CREDIT, pyarrow.array(places, pyarrow.list_(pyarrow.list_(pyarrow.float16())))
    )
    for name, values in columns.items():
        table = table.append_column(name, pyarrow.array(values))
    pyarrow.parquet.write_table(table, rollout)
    write_gallery(run, ())
    return run


def captions(over: Locator) -> list[dict[str, float]]:
    """Where the captions of boxes are, in CSS pixels from the corner of the image."""
    rects: list[dict[str, float]] = over.evaluate(
        """over => {
            const { left: x, top: y } = over.getBoundingClientRect();
            return [...over.querySelectorAll(".credit-caption")].map((caption) => {
                const { left, top, right, bottom } = caption.getBoundingClientRect();
                return { left: left - x, top: top - y, right: right - x, bottom: bottom - y };
            });
        }"""
    )
    return rects


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_objects_are_named_at_their_boxes_and_below_the_image(
    open_gallery: OpenGallery,
    gallery_run: RunFolder,
    tmp_path: Path,
    find_violations: Any,
    scheme: str,
) -> None:
    run = objects_run(gallery_run, tmp_path / "run")
    page = open_gallery("groups?step=1", run=run, allows=NOT_FOUND, color_scheme=scheme)
    # In order of reward: samples 2, 0 and 1.
    samples = samples_of(page, "plain")
    said = samples.locator(".asked-read", has_text="circle")
    expect(said).to_contain_text(
        ["found no circle", "found 2 red circle, 1 more circle", "found blue circle"]
    )
    expect(said.nth(1)).to_contain_text("asked 2 red circle")
    expect(said.locator("mark")).to_have_text(["no circle", "blue circle"])
    # What is right needs no reasons.
    expect(samples.locator(".notes")).to_have_text(
        [re.compile("asked 2 circle, found none"), re.compile("asked 2 circle, found 1")]
    )

    page.keyboard.press("c")
    over = samples.locator(".credit").nth(1)
    names = over.locator(".credit-caption")
    expect(names).to_have_text(["red circle .93", "red circle .93", "blue circle .91"])
    samples.get_by_role("button").nth(1).click()
    large = page.get_by_role("dialog").locator(".credit")
    # Less than the mean of 1/3, and as much as the other.
    expect(large.locator(".credit-caption").first).to_contain_text("colour +0.167")
    expect(large.locator(".credit-caption")).to_have_count(3)
    expect(large.locator(".is-dashed")).to_have_text(["blue circle .91"])
    for shown in (over, large):
        rects = captions(shown)
        for one, other in itertools.combinations(rects, 2):
            is_over = one["left"] < other["right"] and other["left"] < one["right"]
            is_over &= one["top"] < other["bottom"] and other["top"] < one["bottom"]
            assert not is_over
        width = shown.evaluate("over => over.clientWidth")
        assert all(rect["left"] >= 0 and rect["right"] <= width + 1 for rect in rects)
    assert find_violations(page) == []
    side = large.evaluate("over => over.clientWidth")
    large.hover(position={"x": side * 18 / SIDE, "y": side * 26 / SIDE})
    here = large.locator(".credit-here")
    expect(here).to_contain_text("shapes: red circle .93 colour +0.167")


def test_long_lines_below_small_images_are_cut(
    open_gallery: OpenGallery, gallery_run: RunFolder, tmp_path: Path
) -> None:
    run = objects_run(gallery_run, tmp_path / "run")
    page = open_gallery("groups?step=1", run=run, allows=NOT_FOUND)
    page.get_by_label("Show").select_option("captions")
    page.get_by_label("Size").fill("64")
    samples = samples_of(page, "plain")
    expect(samples.locator(".asked-read").first).to_be_visible()
    # It would cover the ellipsis of a line that is cut.
    for mark in samples.locator(".asked-read mark").all():
        expect(mark).to_have_css("background-color", "rgba(0, 0, 0, 0)")
    for sample in samples.all():
        image, place = sample.get_by_role("button").bounding_box(), sample.bounding_box()
        assert image is not None
        assert place is not None
        assert image["width"] <= place["width"] + 1
