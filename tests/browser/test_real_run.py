"""The views on the folder of a real run of edits, whose figures no one would make up."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from glm_grpo.run.folder import RunFolder
from tests.browser.conftest import FindViolations, OpenGallery, show

VIEWS = {
    "progress?samples=all&diff=1": ".cell",
    "groups?step=1": ".sample",
    "groups?step=2&diff=1": ".sample",
    "weights?combine=normalize_then_sum": ".weights-group",
    "find": ".find-grid li",
}
"""Addresses, and what holds an image there."""


def expect_whole_images(page: Page) -> None:
    """Every image of the page is there once it is looked at, and holds pixels."""
    images = page.locator("img")
    expect(images.first).to_be_attached()
    for image in images.all():
        image.scroll_into_view_if_needed()
        expect(image).not_to_have_js_property("naturalWidth", 0)


def test_views_show_the_images_and_figures_of_a_real_run(
    open_gallery: OpenGallery, real_run: RunFolder
) -> None:
    page = open_gallery(run=real_run)
    for fragment, images in VIEWS.items():
        show(page, fragment)
        expect(page.locator(images).first).to_be_visible()
        expect_whole_images(page)
        expect(page.locator(".problem")).to_have_count(0)
        if fragment.startswith(("progress", "groups")):
            expect(page.get_by_alt_text("Source of OPEN", exact=True).first).to_be_visible()

    show(page, "curves")
    titles = page.locator("figure.chart h4")
    expect(titles.filter(has_text="Probability ratio")).to_be_visible()
    assert {"Effective sample size", "Loss", "Most memory in use"} <= {*titles.all_inner_texts()}

    show(page, "groups?step=1&prompt=OPEN&sample=0&large=1")
    page.keyboard.press("s")
    captions = page.get_by_role("dialog").locator("figcaption")
    expect(captions).to_have_text(["Sample", "Target", "Source"])
    page.keyboard.press("d")
    label = page.locator(".large-label")
    expect(label).to_have_text("Difference, brightened: sample minus target")
    page.get_by_role("dialog").get_by_label("With").select_option("Source")
    expect(label).to_have_text("Difference, brightened: sample minus source")
    page.keyboard.press("Escape")

    page.get_by_role("navigation").get_by_role("link", name="Before and after").click()
    page.wait_for_url("**/gallery/report.html")
    expect(page.get_by_role("heading", name="Best, median and worst")).to_be_visible()
    expect_whole_images(page)


def test_views_are_accessible_and_no_page_scrolls_sideways(
    open_gallery: OpenGallery, real_run: RunFolder, find_violations: FindViolations
) -> None:
    width = 360
    # axe asks for the styles of Curves again, which the page's policy refuses.
    page = open_gallery(
        run=real_run,
        color_scheme="dark",
        viewport={"width": width, "height": 800},
        allows="Content Security Policy",
    )
    found: dict[str, list[str]] = {}
    for fragment, shown in {
        "start": "figure.chart canvas",
        "progress?prompt=OPEN&step=2&sample=0": ".is-pinned img",
        "groups?step=1": ".sample img",
        "groups?step=99": ".problem",
        "weights?w.ocr=0.9&w.lpips=-0.2": ".weights-group img",
        "curves?step=2&smooth=0.5&large=reward%2Fmean": ".plot canvas",
        "find?sort=total&order=desc": ".find-region img",
        "groups?step=1&prompt=OPEN&sample=0&large=1": "dialog img",
    }.items():
        show(page, fragment)
        expect(page.locator(shown).first).to_be_attached()
        if fragment.startswith("curves"):
            page.get_by_role("button", name="Values of Total").click()
        if "large" in fragment and "groups" in fragment:
            page.keyboard.press("?")
        found[fragment] = find_violations(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width, fragment
    page.goto((real_run.gallery_path.parent / "report.html").as_uri())
    found["report"] = find_violations(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert {fragment: said for fragment, said in found.items() if said} == {}
