from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.score_map import ScoreBox
from rewards.terms.letters import place_score
from rewards.terms.reading_orders import Box, TextBox
from rewards.terms.text_matching import match_boxes

Value = tuple[str, float, float, float]
"""Letter, left and upper edge of its box, value."""


def line(text: str, left: float = 0.0, top: float = 0.0) -> TextBox:
    """A line of text with 10 x 16 pixels a letter."""
    return TextBox(text, left, top, left + 10.0 * len(text), top + 16.0)


def spell(letters: str, *values: float, left: float = 0.0, top: float = 0.0) -> list[Value]:
    """Values of a line's letters."""
    pairs = zip(letters, values, strict=True)
    return [(letter, left + 10.0 * i, top, value) for i, (letter, value) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("boxes", "texts", "expected"),
    [
        ([line("OPEN")], ["OPEN"], spell("OPEN", *[1 / 4] * 4)),
        ([line("OVEN")], ["OPEN"], spell("OVEN", 1 / 4, 0.0, 1 / 4, 1 / 4)),
        ([line("OPN")], ["OPEN"], spell("OPN", *[1 / 4] * 3)),
        ([line("OPXEN")], ["OPEN"], spell("OPXEN", 1 / 4, 1 / 4, 0.0, 1 / 4, 1 / 4)),
        (
            [line("CAX", 40.0), line("DOG")],
            ["CAT", "DOG"],
            [*spell("DOG", *[1 / 6] * 3), *spell("CAX", 1 / 6, 1 / 6, 0.0, left=40.0)],
        ),
        (
            [line("NOW"), line("OPEN", 5.0, 20.0)],
            ["NOW OPEN"],
            [*spell("NOW", *[1 / 7] * 3), *spell("OPEN", *[1 / 7] * 4, left=5.0, top=20.0)],
        ),
        # In columns; in rows, only one text of two lines would be whole.
        (
            [line("AB"), line("EF", 90.0), line("CD", 0.0, 30.0), line("GH", 90.0, 30.0)],
            ["ABCD", "EFGH"],
            [
                *spell("AB", *[1 / 8] * 2),
                *spell("EF", *[1 / 8] * 2, left=90.0),
                *spell("CD", *[1 / 8] * 2, top=30.0),
                *spell("GH", *[1 / 8] * 2, left=90.0, top=30.0),
            ],
        ),
        # Wanted twice, read once; and read twice, wanted once: the first counts.
        ([line("TEA")], ["TEA", "TEA"], spell("TEA", *[1 / 6] * 3)),
        ([line("TEA TEA")], ["TEA"], spell("TEA TEA", *[1 / 3] * 3, 0.0, *[0.0] * 3)),
        ([line("BUS")], ["OPEN"], spell("BUS", 0.0, 0.0, 0.0)),
        ([], ["OPEN"], []),
    ],
    ids=[
        "right",
        "wrong letter",
        "missing letter",
        "surplus letter",
        "two texts",
        "two lines",
        "columns",
        "wanted twice",
        "read twice",
        "another word",
        "nothing",
    ],
)
def test_right_letters_earn_their_share_where_they_stand(
    boxes: list[TextBox], texts: list[str], expected: list[Value]
) -> None:
    match = match_boxes(boxes, texts)
    pieces = place_score(match)
    expected = [value for value in expected if value[0] != " "]
    assert "".join(piece.text for piece in pieces) == "".join(letter for letter, *_ in expected)
    for piece, (_, *numbers) in zip(pieces, expected, strict=True):
        assert [piece.left, piece.top, piece.value] == pytest.approx(numbers)


def test_letters_have_boxes_of_the_engine_or_equal_parts_of_the_text() -> None:
    tall = TextBox("AB", 0.0, 0.0, 10.0, 40.0)
    (first, second) = place_score(match_boxes([tall], ["AB"]))
    assert first == ScoreBox(0.5, 0.0, 0.0, 10.0, 20.0, "A", "ab:0")
    assert second == ScoreBox(0.5, 0.0, 20.0, 10.0, 40.0, "B", "ab:1")
    upwards = replace(tall, letters=(Box(0.0, 30.0, 10.0, 40.0), Box(0.0, 0.0, 10.0, 30.0)))
    (first, second) = place_score(match_boxes([upwards], ["AB"]))
    assert first == ScoreBox(0.5, 0.0, 30.0, 10.0, 40.0, "A", "ab:0")
    assert second == ScoreBox(0.5, 0.0, 0.0, 10.0, 30.0, "B", "ab:1")


def test_a_letter_is_compared_with_what_stands_for_it_in_other_images() -> None:
    # The X of CAX stands for the T of CAT, that of XTEA for none, like all of "by me".
    boxes = [line("CAX"), line("by me", 0.0, 20.0), line("XTEA", 0.0, 40.0)]
    found = place_score(match_boxes(boxes, ["CAT", "TEA"], extra_text_penalty=0.7))
    assert "".join(box.text for box in found) == "CAXbymeXTEA"
    cat, tea = ([f"{text}:{place}" for place in range(3)] for text in ("cat", "tea"))
    assert [box.kind for box in found] == [*cat, *[""] * 5, *tea]
    assert [box.value for box in found] == pytest.approx(
        [1 / 6, 1 / 6, 0.0, *[0.0] * 5, *[1 / 6] * 3]
    )


def test_both_copies_of_a_text_are_of_one_kind() -> None:
    boxes = [line("TEA"), line("TEN", 0.0, 20.0)]
    found = place_score(match_boxes(boxes, ["TEA", "TEA"]))
    assert [box.kind for box in found] == [f"tea:{place}" for place in range(3)] * 2
    assert [box.value for box in found] == pytest.approx([1 / 6] * 5 + [0.0])


def test_a_ligature_stands_for_its_letters() -> None:
    found = place_score(match_boxes([line("ﬁn")], ["fin"]))
    assert [box.kind for box in found] == ["fin:0 fin:1", "fin:2"]


def test_case_counts_only_where_it_should() -> None:
    match = match_boxes([line("Open")], ["OPEN"], is_case_sensitive=True)
    pieces = place_score(match, is_case_sensitive=True)
    assert [piece.value for piece in pieces] == [1 / 4, 0.0, 0.0, 0.0]
    assert {piece.value for piece in place_score(match_boxes([line("Open")], ["OPEN"]))} == {1 / 4}


@pytest.mark.parametrize(
    ("read", "wanted", "expected"),
    [
        ("ＯＫ", "ok", [("Ｏ", 0, 10, 1 / 2), ("Ｋ", 10, 20, 1 / 2)]),  # noqa: RUF001 - meant
        # One character for two letters, and three.
        ("ﬁn", "fin", [("ﬁ", 0, 10, 2 / 3), ("n", 10, 20, 1 / 3)]),
        ("A…", "A..!", [("A", 0, 10, 1 / 4), ("…", 10, 20, 2 / 4)]),
        # Two for one.
        ("AéB", "aéb", [("A", 0, 10, 1 / 3), ("é", 10, 30, 1 / 3), ("B", 30, 40, 1 / 3)]),
        ("A  B", "ab", [("A", 0, 10, 1 / 2), ("B", 30, 40, 1 / 2)]),
        ("漢字", "字", [("漢", 0, 10, 0.0), ("字", 10, 20, 1.0)]),
    ],
    ids=["full width", "ligature", "dots", "accent", "spaces", "Han"],
)
def test_letters_that_count_as_others_keep_their_places(
    read: str, wanted: str, expected: list[tuple[str, float, float, float]]
) -> None:
    pieces = place_score(match_boxes([line(read)], [wanted]))
    assert [piece.text for piece in pieces] == [letter for letter, *_ in expected]
    for piece, (_, *numbers) in zip(pieces, expected, strict=True):
        assert [piece.left, piece.right, piece.value] == pytest.approx(numbers)


# Few letters, so that texts overlap and tie; and some of which the folded form has more or fewer.
LETTERS = "ABab \u00df\u00bd\uff40\u6f22\ufb01\u2026e\u0301"
PLACES = st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans())
PAGES = st.dictionaries(PLACES, st.text(LETTERS, max_size=6), max_size=6)
TEXTS = st.lists(st.text("ABab", min_size=1, max_size=5), min_size=1, max_size=4)


def box(text: str, row: int, column: int, is_tall: bool) -> TextBox:
    left, top = 60.0 * column, 60.0 * row
    width, height = (20.0, 50.0) if is_tall else (50.0, 20.0)
    return TextBox(text, left, top, left + width, top + height)


@settings(max_examples=400, derandomize=True)
@given(PAGES, TEXTS, st.booleans(), st.floats(0, 1))
def test_right_letters_add_up_to_their_fraction_of_the_texts(
    page: dict[tuple[int, int, bool], str], texts: list[str], is_case: bool, penalty: float
) -> None:
    boxes = [box(text, *place) for place, text in page.items()]
    match = match_boxes(boxes, texts, is_case_sensitive=is_case, extra_text_penalty=penalty)
    found = place_score(match, is_case_sensitive=is_case)
    assert all(0.0 <= box.value <= 1.0 for box in found)
    assert all(box.kind for box in found if box.value)
    # Without penalty and letters in excess, it is the score.
    placed = math.fsum(box.value for box in found)
    assert match.score <= placed + 1e-12
    is_excess = sum(map(len, match.words)) > sum(len(box.kind.split()) for box in found)
    assert is_excess or math.isclose(placed, match.score, rel_tol=1e-12, abs_tol=1e-12)
