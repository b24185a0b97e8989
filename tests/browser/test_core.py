"""The frame of the gallery and its Progress and Groups views, as a reader meets them.

The numbers are those of `RAW` in conftest.py, worked out there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from glm_grpo.run.folder import RunFolder
from tests.browser.conftest import GROUP_SIZE, OpenGallery, change_data

NOT_FOUND = "ERR_FILE_NOT_FOUND"


def group_of(page: Page, prompt_id: str) -> Locator:
    return page.locator(".group").filter(has=page.get_by_role("heading", name=prompt_id, level=3))


def samples_of(page: Page, prompt_id: str) -> Locator:
    """The samples of a group, once they are there."""
    samples = group_of(page, prompt_id).locator(".sample")
    expect(samples).to_have_count(GROUP_SIZE)
    return samples


def wait_until_drawn(page: Page) -> None:
    """Until pictures stand in all groups, few enough to be near the screen, and in all rows."""
    for row in page.locator(".progress-table tbody tr").all():
        row.scroll_into_view_if_needed()
    expect(page.locator(".group:not(:has(.group-pictures))")).to_have_count(0)
    expect(page.locator(".progress-table tbody tr:not(:has([data-place]))")).to_have_count(0)


def change_totals(run: RunFolder, prompt_id: str, totals: list[float]) -> None:
    """Other totals for a prompt of step 1."""

    def change(data: Any) -> None:
        groups = data["steps"][0]["groups"]
        next(group for group in groups if group["prompt_id"] == prompt_id)["total"] = totals

    change_data(run, "steps-000001", change)


def expect_cells(rows: Locator, texts: list[list[str]]) -> None:
    expect(rows).to_have_count(len(texts))
    for index, row in enumerate(texts):
        expect(rows.nth(index).locator("th, td")).to_have_text(row, use_inner_text=True)


@pytest.fixture
def copied_run(gallery_run: RunFolder, tmp_path: Path) -> RunFolder:
    """A run whose files a test may take away."""
    shutil.copytree(gallery_run.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def test_groups_stand_in_order_of_reward(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    headings = group_of(page, "plain").locator(".sample h4")
    expect(headings).to_have_text(["Rank 1 sample 2", "Rank 2 sample 0", "Rank 3 sample 1"])
    headings = group_of(page, "flat").locator(".sample h4")
    expect(headings).to_have_text(["Rank 1 sample 0", "Rank 1 sample 1", "Rank 1 sample 2"])


def test_groups_and_find_call_all_images_best_that_share_the_highest_total(
    open_gallery: OpenGallery, copied_run: RunFolder
) -> None:
    # Of `plain` samples 0 and 2 differ by 2^-22: less than the tolerance, 2^-20 times the highest.
    change_totals(copied_run, "plain", [0.625 - 2.0**-22, 0.25, 0.625])
    page = open_gallery("groups?step=1", run=copied_run)
    headings = group_of(page, "plain").locator(".sample h4")
    expect(headings).to_have_text(["Rank 1 sample 0", "Rank 1 sample 2", "Rank 3 sample 1"])
    page.evaluate("location.hash = '#find?best=1&id=plain&to=1'")
    expect(page.locator(".find-count")).to_have_text("2 of 48 images")
    expect(page.locator("td.find-marks")).to_have_text(["best", "best"])


def test_groups_show_scores_and_the_parts_of_the_total(open_gallery: OpenGallery) -> None:
    best = samples_of(open_gallery("groups?step=1"), "plain").first
    expect_cells(
        best.locator(".scores tr"),
        [
            ["Term", "Score", "Part"],
            ["lpips", "1.000", "0.500"],
            ["ocr", "0.500", "0.125"],
            ["Total", "", "0.625"],
        ],
    )
    # The bar of the best is the longest of the group: 0.5 / 0.625 and 0.125 / 0.625 of its width.
    pieces = best.locator(".bar:not(.advantage) .piece").all()
    ends = [
        [piece.evaluate(f"piece => piece.style.{side}") for side in ("left", "width")]
        for piece in pieces
    ]
    assert ends == [["0%", "80%"], ["80%", "20%"]]


def test_groups_parts_add_up_where_terms_are_standardised(
    open_gallery: OpenGallery, standardised_run: RunFolder
) -> None:
    page = open_gallery("groups?step=1", run=standardised_run)
    for sample in samples_of(page, "plain").all():
        texts = sample.locator(".scores td:last-child").all_inner_texts()
        *parts, total = [float(text.replace("\u2212", "-")) for text in texts]
        # Three figures, each rounded to 0.001.
        assert sum(parts) == pytest.approx(total, abs=0.0015)
    expect(page.locator(".group .problem")).to_have_count(0)


def test_groups_say_where_totals_were_weighed_otherwise(
    open_gallery: OpenGallery, copied_run: RunFolder
) -> None:
    data = copied_run.gallery_path.parent / "data" / "run.js"
    text = data.read_text(encoding="utf-8")
    changed = re.sub(r'("name": ?"lpips".*?"weight": ?)0\.5', r"\g<1>0.75", text)
    assert changed != text
    data.write_text(changed, encoding="utf-8")
    page = open_gallery("groups?step=1", run=copied_run)
    expect(group_of(page, "plain").locator(".problem")).to_contain_text("do not add up")


def test_groups_say_which_letters_are_missing(
    open_gallery: OpenGallery, copied_run: RunFolder
) -> None:
    def change(data: Any) -> None:
        group = next(each for each in data["steps"][0]["groups"] if each["prompt_id"] == "plain")
        group["notes"]["ocr"][1] = {"read": "CA", "marks": [["CA", True]], "errors": [["T", ""]]}

    change_data(copied_run, "steps-000001", change)
    page = open_gallery("groups?step=1", run=copied_run)
    # The last in order of reward, of which nothing was read before.
    note = samples_of(page, "plain").nth(2).locator(".note")
    expect(note).to_have_text(re.compile(r"^CA\s+no T\s+\(missing: T\)$"))


def test_groups_show_advantages_with_their_sign(open_gallery: OpenGallery) -> None:
    samples = samples_of(open_gallery("groups?step=1"), "plain")
    # (0.625, 0.5, 0.25) less their mean 0.458333, over their standard deviation 0.190941.
    expect(samples.locator(".line strong")).to_have_text(["+0.873", "+0.218", "\u22121.091"])
    places = samples.locator(".advantage .piece").evaluate_all(
        "pieces => pieces.map(piece => [piece.style.left, piece.style.width])"
    )
    # The largest of the step reaches the end of its half.
    assert places[2] == ["0%", "50%"]
    assert places[0][0] == places[1][0] == "50%"


def test_groups_mark_the_wrong_letters_that_were_read(open_gallery: OpenGallery) -> None:
    samples = samples_of(open_gallery("groups?step=1"), "plain")
    # In order of reward: what was read of samples 2, 0 and 1.
    for index, wrong in enumerate(([], ["X"], [])):
        expect(samples.nth(index).locator(".asked-read mark")).to_have_text(wrong)
    expect(samples.nth(1).locator(".note")).to_have_text(re.compile(r"^CXT\s+\(wrong: X\)$"))
    expect(samples.nth(2).locator(".note")).to_have_text("nothing")
    said = samples.nth(1).locator(".asked-read")
    expect(said).to_have_text(re.compile(r"^asked CAT, read CXT\b"))


def test_groups_mark_flat_groups_and_terms_that_do_not_apply(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    expect(page.locator("p[role=status]")).to_contain_text("4 prompts, 12 samples")
    expect(page.locator("p[role=status]")).to_contain_text("1 flat group.")
    expect(page.locator(".group:has(.badge)")).to_have_count(1)
    expect(group_of(page, "flat")).to_contain_text("so every advantage is 0")
    masked = group_of(page, "masked")
    expect(masked).to_contain_text("This prompt has no target picture.")
    expect_cells(
        samples_of(page, "masked").first.locator(".scores tbody tr"),
        [["lpips", "does not apply"], ["ocr", "1.000", "0.750"]],
    )


def test_groups_lay_pictures_over_their_target(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    page.keyboard.press("d")
    expect(page.get_by_label("Difference to the target")).to_be_checked()
    expect(page).to_have_url(re.compile(r"#groups\?step=1&diff=1$"))
    layers = samples_of(page, "plain").first.locator(".difference img")
    expect(layers).to_have_count(2)
    sources = layers.evaluate_all("layers => layers.map(layer => layer.getAttribute('src'))")
    assert sources == ["thumbs/train-targets/plain.webp", "thumbs/step-000001/plain-2.webp"]
    assert layers.last.evaluate("layer => getComputedStyle(layer).mixBlendMode") == "difference"
    expect(group_of(page, "masked").locator(".sample").first).to_contain_text("no target")
    page.get_by_label("Difference to the target").uncheck()
    expect(page.locator(".difference")).to_have_count(0)


def test_groups_go_from_step_to_step_by_keys_buttons_and_choice(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=3", allows=NOT_FOUND)
    choice = page.get_by_label("Training step")
    page.keyboard.press("ArrowRight")
    expect(page.locator("p[role=status]")).to_contain_text("Step 12:")
    expect(choice).to_have_value("12")
    page.get_by_role("button", name="Previous step").click()
    expect(page.locator("p[role=status]")).to_contain_text("Step 3:")
    choice.select_option("1")
    expect(page.locator("p[role=status]")).to_contain_text("Step 1:")
    expect(page.get_by_role("button", name="Previous step")).to_be_disabled()
    page.go_back()
    expect(choice).to_have_value("3")


def test_groups_move_between_prompts_by_keys(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(group_of(page, "masked").get_by_role("heading", level=3)).to_be_focused()
    page.keyboard.press("k")
    expect(group_of(page, "plain").get_by_role("heading", level=3)).to_be_focused()


def test_groups_address_leads_to_a_sample(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=12&prompt=flat&sample=1")
    group = group_of(page, "flat")
    expect(group.get_by_role("heading", level=3)).to_be_in_viewport()
    expect(group.locator(".sample[aria-current]")).to_contain_text("sample 1")


def test_viewer_has_an_address(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1&prompt=plain&sample=2&large=1")
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text(
        "Step 1: plain, sample 2, rank 1 of 3"
    )


def test_progress_shows_prompts_by_evaluation_with_changes(open_gallery: OpenGallery) -> None:
    page = open_gallery("progress")
    expect(page.locator("thead th")).to_have_text(
        ["Prompt", "Target", re.compile("^Step 0"), re.compile("^Step 6"), re.compile("^Step 12")]
    )
    row = page.get_by_role("row").filter(has_text='a sign with the word "CAT"')
    # Sample 0: 0.5, then ocr 1 more and 0.5 more, times 0.25. The mean of both samples too.
    expect(row.locator(".cell-figures")).to_have_text(
        [
            re.compile(r"^0\.500\s*$"),
            re.compile(r"^0\.750\s+\+0\.250$"),
            re.compile(r"^0\.625\s+\+0\.125$"),
        ]
    )
    expect(row.locator(".row-change")).to_have_text("mean of 2 samples 0.500 +0.125")
    expect(row.get_by_role("button", name="plain, step 6")).to_have_accessible_name(
        "plain, step 6, sample 0: total 0.750, change +0.250, asked CAT, read CXT"
    )


def test_progress_sorts_rows(open_gallery: OpenGallery, hostile: str) -> None:
    page = open_gallery("progress")
    names = page.locator(".row-id")
    expect(names).to_have_text(["plain", "masked", "flat", re.compile("^<script>")])
    page.get_by_label("Order").select_option("Identifier")
    expect(names).to_have_text([re.compile("^<script>"), "flat", "masked", "plain"])
    # Mean totals at step 12: plain 0.5, masked 0.375, flat 0.375, hostile 0.4375.
    page.get_by_label("Order").select_option("Highest total first")
    expect(names).to_have_text(["plain", re.compile("^<script>"), "masked", "flat"])
    page.get_by_label("Order").select_option("Largest fall first")
    expect(names.last).to_have_text("plain")
    assert page.evaluate("glmGallery.route().params.sort") == "fall"


def test_progress_shows_every_score_of_what_is_pointed_at(open_gallery: OpenGallery) -> None:
    page = open_gallery("progress")
    details = page.get_by_role("complementary")
    expect(details).to_contain_text("Point at a picture")
    page.get_by_role("button", name="plain, step 6, sample 0").hover()
    expect(details.get_by_role("heading")).to_have_text("plain: step 6, sample 0")
    expect_cells(
        details.locator("tr"),
        [
            ["Term", "Score", "Since step 0"],
            ["lpips", "1.000", "0.000"],
            ["ocr", "1.000", "+1.000"],
            ["Total", "0.750", "+0.250"],
        ],
    )
    expect(details.locator("mark")).to_have_text("X")


def test_progress_moves_by_arrow_keys_with_one_tab_stop(open_gallery: OpenGallery) -> None:
    page = open_gallery("progress")
    page.get_by_role("button", name="plain, step 0, sample 0").focus()
    for key in ("ArrowRight", "ArrowDown", "End"):
        page.keyboard.press(key)
    details = page.get_by_role("complementary")
    expect(details.get_by_role("heading")).to_have_text("masked: step 12, sample 0")
    expect(page.locator("[role=grid] [tabindex='0']")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    # The address is written later than the page shows a change; both ends are waited for.
    expect(page).to_have_url(re.compile("prompt=masked&step=12&sample=0&large=1$"))
    page.keyboard.press("Escape")
    expect(page.locator(".is-pinned")).to_have_count(1)
    expect(page).to_have_url(re.compile("prompt=masked&step=12&sample=0$"))
    # A prompt without a target has a place there all the same.
    page.keyboard.press("Home")
    expect(page.get_by_text("no target", exact=True)).to_be_focused()


def test_progress_address_restores_the_view(open_gallery: OpenGallery) -> None:
    page = open_gallery("progress?sort=id&samples=all&diff=1&prompt=plain&step=6&sample=1")
    expect(page.get_by_label("Order")).to_have_value("id")
    expect(page.get_by_role("combobox", name="Sample")).to_have_value("all")
    expect(page.locator(".is-pinned .difference")).to_be_in_viewport()
    expect(page.get_by_role("complementary").get_by_role("heading")).to_have_text(
        "plain: step 6, sample 1"
    )
    page.get_by_role("button", name="Enlarge").click()
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text(
        "plain: step 6, sample 1"
    )
    page.keyboard.press("PageUp")
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text(
        "plain: step 0, sample 1"
    )
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Enlarge")).to_be_focused()


def test_progress_address_shows_the_sample_it_names(open_gallery: OpenGallery) -> None:
    page = open_gallery("progress?prompt=plain&step=6&sample=1")
    expect(page.locator(".is-pinned")).to_be_in_viewport()
    expect(page.get_by_role("combobox", name="Sample")).to_have_value("1")


def test_progress_offers_the_nearest_evaluation(open_gallery: OpenGallery) -> None:
    page = open_gallery("progress?prompt=plain&step=7&sample=0")
    expect(page.locator("main .problem")).to_contain_text('no evaluation at step "7"')
    page.get_by_role("link", name="step 6").click()
    expect(page.locator(".is-pinned")).to_have_count(1)


def test_progress_details_open_by_touch(open_gallery: OpenGallery) -> None:
    page = open_gallery(
        "progress", viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True
    )
    page.get_by_role("button", name="plain, step 0, sample 0").tap()
    page.get_by_role("dialog").get_by_role("button", name="Close").tap()
    details = page.get_by_role("complementary")
    expect(details.get_by_role("heading")).to_have_text("plain: step 0, sample 0")
    expect(details.get_by_role("button", name="Close")).to_be_in_viewport()
    details.get_by_role("button", name="Close").tap()
    expect(details).to_be_hidden()


@pytest.mark.parametrize("fragment", ["progress", "groups?step=1"])
def test_hostile_prompt_is_text_and_does_nothing(
    open_gallery: OpenGallery, hostile: str, fragment: str
) -> None:
    page = open_gallery(fragment)
    expect(page.get_by_text(hostile, exact=True).first).to_be_visible()
    wait_until_drawn(page)
    expect(page.locator("img[src=x]")).to_have_count(0)
    expect(page.locator("#app script")).to_have_count(0)
    assert "taken over" not in page.title()


def test_name_notes_and_tags_of_a_run_are_text(
    open_gallery: OpenGallery, hostile: str, copied_run: RunFolder
) -> None:
    said = {"name": hostile, "notes": f"{hostile}\nand more", "tags": ["ocr", hostile]}
    change_data(copied_run, "run", lambda data: data.update(label=said))
    page = open_gallery("curves", run=copied_run)
    head = page.locator(".page-head")
    expect(head.locator(".run-title")).to_have_text(hostile)
    expect(head.get_by_text(f"#ocr #{hostile}")).to_be_visible()
    head.get_by_text("Notes").click()
    expect(head.locator(".run-notes p")).to_be_visible()
    assert head.locator(".run-notes p").inner_text() == said["notes"]
    expect(page.locator("img[src=x]")).to_have_count(0)


def test_parts_of_large_scores_add_up_to_within_their_size(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    found = page.evaluate(
        """([off]) => {
          glmGallery.run.reward = { combine: "weighted_sum", steering: {}, terms: [
            { name: "big", weight: 0.3, std_floor: 1e-4, at_least: null }] };
          const raw = [50000.1, 50001.3];
          const total = raw.map((value) => Math.fround(Math.fround(value * 0.3) + off));
          const group = { prompt_id: "p", images: ["a", "b"], raw: { big: raw }, total };
          return glmGallery.groupSamples.arrange(group).problem;
        }""",
        [0.01],
    )
    assert found is None
    assert "were weighted with others" in page.evaluate(
        """() => {
          const group = { prompt_id: "p", images: ["a"], raw: { big: [50000] }, total: [15010] };
          return glmGallery.groupSamples.arrange(group).problem;
        }"""
    )


def test_hostile_prompt_can_be_addressed(open_gallery: OpenGallery, hostile: str) -> None:
    page = open_gallery("groups?step=1")
    group = page.locator(".group").last
    group.get_by_role("button", name=re.compile("^<script>.*sample 0", re.DOTALL)).first.click()
    expect(page).to_have_url(re.compile("large=1$"))
    page.reload()
    expect(page.get_by_role("dialog").get_by_role("heading")).to_contain_text("<script>")
    assert page.evaluate("glmGallery.route().params.prompt") == hostile


def test_long_prompt_is_cut_until_asked_for(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    group = group_of(page, "flat")
    assert group.inner_text().count("word") < 100
    group.get_by_role("button", name="more (5,000 characters)").click()
    expect(group.get_by_role("button", name="less")).to_be_visible()
    assert group.inner_text().count("word") == 1000


def test_missing_picture_is_said_in_its_place(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=3", allows=NOT_FOUND)
    samples = group_of(page, "plain").locator(".sample")
    expect(samples.nth(2)).to_contain_text("picture missing")
    expect(samples.nth(0)).not_to_contain_text("picture missing")


def test_thumbnail_stands_in_for_a_missing_picture(
    open_gallery: OpenGallery, copied_run: RunFolder
) -> None:
    shutil.rmtree(copied_run.path / "images")
    fragment = "groups?step=1&prompt=plain&sample=0&large=1"
    page = open_gallery(fragment, run=copied_run, allows=NOT_FOUND)
    picture = page.get_by_role("dialog").get_by_role("img", name="plain, sample 0", exact=False)
    expect(picture.first).to_have_attribute("src", "thumbs/step-000001/plain-0.webp")


def test_damaged_table_is_said_and_the_rest_works(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=13")
    expect(page.locator("main .problem")).to_contain_text("step-000013.parquet")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".sample")).to_have_count(12)


def test_unknown_step_and_view_offer_the_nearest(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=99")
    expect(page.locator("main .problem")).to_contain_text('no training step "99"')
    page.get_by_role("link", name="step 13").click()
    expect(page.get_by_label("Training step")).to_have_value("13")
    page.evaluate("location.hash = '#grups'")
    expect(page.get_by_role("heading", name="Unknown view")).to_be_visible()
    page.locator("main").get_by_role("link", name="Groups").click()
    expect(page.get_by_role("heading", name="Groups")).to_be_focused()


def test_navigation_moves_focus_and_title_and_marks_the_view(open_gallery: OpenGallery) -> None:
    page = open_gallery()
    name = page.locator("h1").inner_text()
    expect(page).to_have_title(f"Start: {name}")
    expect(page.get_by_role("banner")).to_contain_text("step 13 of 40")
    navigation = page.get_by_role("navigation")
    navigation.get_by_role("link", name="Groups").click()
    expect(page.get_by_role("heading", name="Groups")).to_be_focused()
    expect(navigation.locator("[aria-current=page]")).to_have_text("Groups")
    expect(page).to_have_title(f"Groups: {name}")
    report = navigation.get_by_role("link", name="Before and after")
    expect(report).to_have_attribute("href", "report.html")
    page.go_back()
    expect(page.get_by_role("heading", name="Start", exact=True)).to_be_focused()


def test_skip_button_is_the_first_stop_and_leads_to_the_view(open_gallery: OpenGallery) -> None:
    page = open_gallery()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Skip to the view")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Start", exact=True)).to_be_focused()


def test_help_lists_keys_and_switches_them_off(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Next and previous prompt")
    dialog.get_by_label("Use single-character shortcuts").uncheck()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.keyboard.press("d")
    expect(page.get_by_label("Difference to the target")).not_to_be_checked()
    page.get_by_role("button", name="Keys").click()
    expect(dialog).to_be_visible()


@pytest.mark.parametrize(
    ("fragment", "role", "name"),
    [
        ("groups?step=1", "checkbox", "Difference to the target, brightened"),
        ("groups?step=1", "button", "Next step"),
        ("weights", "radio", "weighted_sum"),
        ("weights", "slider", "lpips"),
        ("progress", "button", "plain, step 0, sample 0"),
    ],
)
def test_keys_work_while_a_control_has_the_focus(
    open_gallery: OpenGallery, fragment: str, role: Any, name: str
) -> None:
    page = open_gallery(fragment, allows=NOT_FOUND)
    page.get_by_role(role, name=name).first.focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("The pages, in the order of the navigation")
    page.keyboard.press("Escape")
    expect(page.get_by_role(role, name=name).first).to_be_focused()
    page.keyboard.press("5")
    expect(page.get_by_role("heading", level=2)).to_have_text("Curves")


def test_keys_leave_a_control_what_it_needs_itself(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=2")
    page.get_by_label("Difference to the target").focus()
    page.keyboard.press("ArrowLeft")
    choice = page.get_by_label("Training step")
    expect(choice).to_have_value("1")
    # Digits choose a step.
    choice.focus()
    page.keyboard.press("4")
    expect(page.get_by_role("heading", level=2)).to_have_text("Groups")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    # This view has neither; others do.
    page.evaluate(
        """() => document.querySelector("main").insertAdjacentHTML("beforeend",
          `<input type="range" value="5" aria-label="range">
           <input type="number" aria-label="number"><input type="search" aria-label="search">`)"""
    )
    page.get_by_label("range").press("ArrowRight")
    expect(page.get_by_label("range")).to_have_value("6")
    expect(choice).to_have_value("1")
    for field in ("number", "search"):
        for key in ("4", "?", "ArrowRight"):
            page.get_by_label(field).press(key)
    expect(page.get_by_label("number")).to_have_value("4")
    expect(page.get_by_label("search")).to_have_value("4?")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(choice).to_have_value("1")


def test_last_key_leads_to_before_and_after(open_gallery: OpenGallery) -> None:
    page = open_gallery()
    page.keyboard.press("0")
    page.wait_for_url("**/gallery/report.html")


def test_dialogs_take_the_focus_without_a_word_in_the_console(open_gallery: OpenGallery) -> None:
    page = open_gallery("groups?step=1")
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.get_by_role("button", name="Keys").click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Close")).to_be_focused()
    page.keyboard.press("Escape")
    group_of(page, "plain").get_by_role("button", name=re.compile("^plain, sample 0")).click()
    expect(page.get_by_role("dialog").get_by_role("group", name="Pictures of")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert said == []


def test_phones_show_the_end_of_the_name_of_the_run(
    open_gallery: OpenGallery, copied_run: RunFolder
) -> None:
    change_data(copied_run, "run", lambda run: run.update(name="2026-11-21 / 18-28-54"))
    page = open_gallery(run=copied_run, viewport={"width": 360, "height": 740})
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_have_text("2026-11-21 / 18-28-54")
    assert heading.evaluate("heading => heading.scrollWidth <= heading.clientWidth")
    # The time stands in one line.
    lines = page.locator(".run-name").evaluate(
        "name => name.clientHeight / Number.parseFloat(getComputedStyle(name).lineHeight)"
    )
    assert lines == pytest.approx(1, abs=0.2)


def test_failed_scripts_and_files_leave_the_rest_working(
    open_gallery: OpenGallery, copied_run: RunFolder
) -> None:
    gallery = copied_run.gallery_path.parent
    (gallery / "assets" / "groups.js").unlink()
    (gallery / "data" / "evaluation-000006.js").write_text("glmGallery.receive(", encoding="utf-8")
    page = open_gallery("groups?step=1", run=copied_run, allows=NOT_FOUND, throws=True)
    expect(page.locator("main")).to_contain_text("assets/groups.js")
    expect(page.get_by_role("banner")).to_contain_text("assets/groups.js: is missing or damaged")
    page.get_by_role("link", name="Progress").click()
    expect(page.locator("main .problem")).to_contain_text("data/evaluation-000006.js is missing")
    expect(page.get_by_role("banner")).to_contain_text("data/evaluation-000006.js: is missing")
    wait_until_drawn(page)
    expect(page.locator(".cell-figures")).to_have_count(8)


def test_missing_list_of_the_run_is_said(open_gallery: OpenGallery, copied_run: RunFolder) -> None:
    (copied_run.gallery_path.parent / "data" / "run.js").unlink()
    page = open_gallery(run=copied_run, allows=NOT_FOUND)
    expect(page.get_by_role("heading", level=1)).to_have_text("This gallery cannot be shown")
    expect(page.locator("main")).to_contain_text("data/run.js")


@pytest.mark.parametrize(
    ("fragment", "what"),
    [
        ("", "Nothing is recorded yet"),
        ("progress", "No evaluation is stored"),
        ("groups", "No training step"),
    ],
)
def test_run_without_records_says_what_will_appear(
    open_gallery: OpenGallery, empty_run: RunFolder, fragment: str, what: str
) -> None:
    page = open_gallery(fragment, run=empty_run)
    expect(page.locator("main")).to_contain_text(what)
    expect(page.locator("main")).to_contain_text("It appears by itself")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "fragment",
    [
        "progress?prompt=plain&step=6&sample=0",
        "groups?step=1",
        "groups?step=1&prompt=plain&sample=0&large=1",
        "groups?step=99",
    ],
)
def test_views_pass_axe(
    open_gallery: OpenGallery,
    find_violations: Callable[[Page], list[str]],
    fragment: str,
    scheme: str,
) -> None:
    page = open_gallery(fragment, color_scheme=scheme)
    page.wait_for_selector(".is-pinned, .sample, main .problem")
    wait_until_drawn(page)
    expect(page.get_by_role("dialog")).to_have_count(int("large=1" in fragment))
    assert find_violations(page) == []


@pytest.mark.parametrize("fragment", ["progress?samples=all", "groups?step=1", "nothing"])
def test_phones_scroll_no_page_sideways(open_gallery: OpenGallery, fragment: str) -> None:
    page = open_gallery(fragment, viewport={"width": 360, "height": 740})
    page.wait_for_selector(".cell, .sample, main .problem")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
