from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from glm_grpo.studio.gallery.readings import read_letters
from rewards.terms.text_matching import fold_text, match_texts

TEXTS = st.text(
    alphabet="abAB \u2019\u00b4\u2033\u2013é\u0301\ufb01\uff11ß한ᄒ\u1161ｶﾞ \n漢", max_size=12
)


@pytest.mark.parametrize(
    ("read", "wanted", "marks"),
    [
        ("OPEN", ["OPEN"], [("OPEN", True)]),
        ("OPFN", ["OPEN"], [("OP", True), ("F", False), ("N", True)]),
        ("OPXEN", ["OPEN"], [("OP", True), ("X", False), ("EN", True)]),
        # Words that no text takes are wrong, whatever their letters.
        ("OPEN NOW", ["OPEN"], [("OPEN ", True), ("NOW", False)]),
        # Texts in another order, over several words.
        ("24 OP EN", ["OPEN", "24"], [("24 OP EN", True)]),
        # Words of different paragraphs are no neighbours: only OP is taken.
        ("OP\n\nEN", ["OPEN"], [("OP\n\n", True), ("EN", False)]),
        # Asked for twice, there once.
        ("BAR BAR BAR", ["BAR", "BAR"], [("BAR BAR ", True), ("BAR", False)]),
        # What does not count as a difference.
        ("\uff4f\uff50\uff45\uff4e", ["OPEN"], [("\uff4f\uff50\uff45\uff4e", True)]),
        ("cafe\u0301", ["CAFE"], [("caf", True), ("e\u0301", False)]),
        # A mark is no piece of its own, also where it makes no other letter of the one before.
        ("ax\u0301", ["AX"], [("a", True), ("x\u0301", False)]),
        # One letter of two that it folds into is right: the sign as a whole is not.
        ("\u00df", ["s"], [("\u00df", False)]),
        ("", ["OPEN"], []),
    ],
)
def test_read_letters_tells_right_letters_from_wrong_ones(
    read: str, wanted: list[str], marks: list[tuple[str, bool]]
) -> None:
    assert list(read_letters(read, wanted).marks) == marks


def test_read_letters_minds_case_where_the_term_does() -> None:
    reading = read_letters("OpEN", ["OPEN"], is_case_sensitive=True)
    assert reading.marks == (("O", True), ("p", False), ("EN", True))
    assert read_letters("OPN", ["OPeN"], is_case_sensitive=True).missing == "e"


@given(read=TEXTS, wanted=st.lists(TEXTS.filter(str.strip), max_size=3))
# A half-width mark of which only the plain form combines, before one that joins the letter.
@example(read="A\uff9e\u0301", wanted=["\uff9e"])
def test_read_letters_gives_the_reading_back_in_pieces_of_alternating_kind(
    read: str, wanted: list[str]
) -> None:
    marks = read_letters(read, wanted).marks
    assert "".join(piece for piece, _ in marks) == read
    assert "".join(fold_text(piece) for piece, _ in marks) == fold_text(read)
    assert all(first[1] != second[1] for first, second in itertools.pairwise(marks))


@given(
    read=st.text(alphabet="abc ", max_size=10),
    wanted=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=2),
)
def test_read_letters_agrees_with_the_score(read: str, wanted: list[str]) -> None:
    marks = read_letters(read, wanted).marks
    right = sum(len(fold_text(piece)) for piece, is_right in marks if is_right)
    score = match_texts(read, wanted, extra_text_penalty=1.0)
    # All is right, and nothing is missing or too much, exactly where the score is 1.
    is_perfect = right == len(fold_text(read)) == sum(map(len, wanted))
    assert (score == 1.0) == is_perfect
    # Without a letter in common there is no score, and the other way round.
    assert (match_texts(read, wanted) == 0.0) == (right == 0)


@pytest.mark.parametrize(
    ("read", "wanted", "missing"),
    [
        ("OPEN", ["OPEN"], ""),
        # A wrong letter stands in the place of the one that was asked for.
        ("0PFN", ["OPEN"], ""),
        ("OPPN", ["OPEN"], ""),
        ("OPN", ["OPEN"], "E"),
        # A text that took no word misses all.
        ("NOW", ["AT"], "AT"),
        ("ope", ["Open"], "N"),
    ],
)
def test_read_letters_names_the_letters_that_are_missing(
    read: str, wanted: list[str], missing: str
) -> None:
    assert read_letters(read, wanted).missing == missing
