"""The Letters view: its counts are those of the readings, and lead to the pictures."""

from __future__ import annotations

import re
from collections import Counter

from playwright.sync_api import Page, expect

from glm_grpo.gallery.readings import asked_letters, read_letters
from tests.browser.conftest import HOSTILE, NOTES, STEPS, OpenGallery

NOT_FOUND = "ERR_FILE_NOT_FOUND"
TEXTS = (("CAT",), ("DOG",), (), (HOSTILE,))


def count(page: Page) -> dict[str, tuple[int, int]]:
    """Wrong and asked for, by letter, as the titles of the figures say."""
    rows = page.locator(".letters-region tbody tr").evaluate_all(
        "rows => rows.map((row) => [row.cells[0].textContent, row.querySelector('a')?.title])"
    )
    found = {}
    for letter, said in rows:
        match = re.fullmatch(r"(\d+) of (\d+)", said or "")
        if match:
            found[letter] = (int(match[1]), int(match[2]))
    return found


def test_letters_count_what_was_asked_for_and_read(open_gallery: OpenGallery) -> None:
    asked: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for texts, notes in zip(TEXTS, NOTES, strict=True):
        for note in notes:
            asked.update(asked_letters(texts))
            wrong.update(letter for letter, _ in read_letters(note, texts).errors)
    # Each step has the same readings.
    times = len(STEPS)
    expected = {letter: (times * n, times * asked[letter]) for letter, n in wrong.items()}
    page = open_gallery("letters", allows=NOT_FOUND)
    assert count(page) == expected
    # Most mistakes first.
    counts = [number for number, _ in count(page).values()]
    assert counts == sorted(counts, reverse=True)
    heads = page.locator(".letters-region thead th").all_inner_texts()
    assert heads[3:] == [f"Step {step}" for step in STEPS]


def test_letters_lead_to_their_pictures(open_gallery: OpenGallery) -> None:
    page = open_gallery("letters?sort=letter", allows=NOT_FOUND)
    row = page.locator(".letters-region tbody tr").filter(
        has=page.get_by_role("rowheader", name="O", exact=True)
    )
    # In DOG, read as D0G by one sample of each step.
    row.get_by_role("link", name="0", exact=True).click()
    expect(page.locator(".find-count")).to_have_text("4 of 48 images")
    pictures = page.locator(".find-grid li")
    expect(pictures).to_have_count(4)
    expect(pictures.first).to_contain_text("asked DOG, read D0G")
    page.go_back()
    # Of one step, whatever it was read as: D0G, and twice nothing of the long text.
    row.locator("td").nth(3).get_by_role("link").click()
    expect(page.locator(".find-count")).to_have_text("3 of 48 images")
