"""The Groups view, as a reader meets it. The numbers are those of `RAW` in conftest.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from playwright.sync_api import Locator, Page, expect

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import CREDIT, PIECES, read_table
from glm_grpo.studio.gallery import write_gallery
from tests.browser.conftest import (
    GROUP_SIZE,
    NOT_FOUND,
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
    # A run that was trained with it shows it; `c` turns it off and on again.
    page.keyboard.press("c")
    expect(page).to_have_url(re.compile("credit=0"))
    expect(page.locator(".credit")).to_have_count(0)
    page.keyboard.press("c")
    expect(page).to_have_url(re.compile(r"#groups\?step=1$"))
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
    show(page, "groups?step=2")
    samples_of(page, "plain")
    expect(page.locator(".credit")).to_have_count(0)

    show(page, "find?id=plain&to=1")
    page.locator(".find-region .image").first.click()
    dialog.get_by_role("button", name="Credit").click()
    expect(dialog.locator(".credit canvas")).to_have_count(1)
