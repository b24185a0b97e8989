"""The Film view: one prompt through all steps."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenGallery


def test_film_shows_a_held_out_prompt_at_every_evaluation(open_gallery: OpenGallery) -> None:
    page = open_gallery("film")
    strip = page.get_by_role("list", name="Pictures by step")
    # Totals of the first sample of `plain`: see test_core.py.
    expect(strip.locator("p")).to_have_text(
        [
            re.compile(r"^Step 0\s+0\.500\s*$"),
            re.compile(r"^Step 6\s+0\.750\s+\+0\.250$"),
            re.compile(r"^Step 12\s+0\.625\s+\+0\.125$"),
        ]
    )
    page.get_by_role("button", name="Next prompt").click()
    expect(page.locator(".film-prompt")).to_have_value("masked")
    page.keyboard.press("k")
    expect(page.locator(".film-prompt")).to_have_value("plain")


def test_film_plays_pauses_and_begins_again(open_gallery: OpenGallery) -> None:
    page = open_gallery("film?prompt=plain&step=12")
    slider = page.get_by_role("slider", name="Step")
    expect(slider).to_have_value("2")
    page.get_by_label("Speed").select_option("8 a second")
    page.get_by_role("button", name="Play").click()
    expect(slider).to_have_value("0")
    expect(slider).to_have_value("1")
    page.get_by_role("button", name="Pause").click()
    step = page.evaluate("glmGallery.route().params.step")
    page.wait_for_timeout(300)
    assert page.evaluate("glmGallery.route().params.step") == step
    slider.fill("1")
    expect(page.locator(".film-caption")).to_contain_text("Step 6, sample 0: total 0.750")
    expect(page.locator(".strip [aria-current]")).to_contain_text("Step 6")
    source = page.locator(".film-screen img")
    expect(source).to_have_attribute("src", "../images/eval-000006/plain-0.png")


def test_film_of_a_training_prompt_shows_the_best_of_each_step(open_gallery: OpenGallery) -> None:
    page = open_gallery("film?of=training&prompt=plain")
    pictures = page.locator(".strip img")
    expect(pictures).to_have_count(4)
    sources = pictures.evaluate_all("images => images.map(image => image.getAttribute('src'))")
    steps = (1, 2, 3, 12)
    assert sources == [f"thumbs/step-{step:06d}/plain-2.webp" for step in steps]


def test_film_opens_large_and_goes_through_steps(open_gallery: OpenGallery) -> None:
    page = open_gallery("film?prompt=plain")
    page.locator(".strip button").nth(1).click()
    heading = page.get_by_role("dialog").get_by_role("heading", level=2)
    expect(heading).to_have_text("plain: step 6, sample 0")
    page.keyboard.press("ArrowRight")
    expect(heading).to_have_text("plain: step 12, sample 0")
    page.keyboard.press("Escape")
    expect(page.get_by_role("slider", name="Step")).to_have_value("2")


def test_film_without_evaluations_says_what_will_appear(
    open_gallery: OpenGallery, empty_run: object
) -> None:
    page = open_gallery("film", run=empty_run)
    expect(page.locator("main")).to_contain_text("No evaluation is stored yet")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_film_passes_axe_on_a_phone(
    open_gallery: OpenGallery, find_violations: Callable[[Page], list[str]], scheme: str
) -> None:
    viewport = {"width": 390, "height": 844}
    page = open_gallery("film", color_scheme=scheme, viewport=viewport)
    expect(page.locator(".strip img")).to_have_count(3)
    assert find_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390
