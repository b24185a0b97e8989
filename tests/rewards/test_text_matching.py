from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.terms.reading_orders import TextBox, reading_orders
from rewards.terms.text_matching import match_boxes, match_texts


@pytest.mark.parametrize(
    ("read", "wanted", "score"),
    [
        ("OPEN", "OPEN", 1.0),
        ("", "OPEN", 0.0),
        ("OPFN", "OPEN", 0.75),  # one of four replaced
        ("OEN", "OPEN", 0.75),  # one of four missing
        ("OPEN24", "OPEN", 4 / 6),  # in one word: two of six unasked for
        ("o p\ne n", "OPEN", 1.0),  # case and white space
        ("ＯＰＥＮ", "open", 1.0),  # full-width letters  # noqa: RUF001 - meant
        ("STRASSE", "straße", 1.0),
        ("ﬁn", "FIN", 1.0),  # ligature
        ("CAFE\u0301", "café", 1.0),  # the accent as a character of its own
        ("DON'T", "DON\u2019T", 1.0),
        ("DON\u00b4T WON`T", "don't won't", 1.0),  # accents in place of apostrophes
        ("DON'T -5", "DON\uff40T \u207b5", 1.0),  # their full-width form, a raised minus
        ("l\u2019\u00e9t\u00e9", "L'\u00c9T\u00c9", 1.0),
        ("A-B", "A\u2013B", 1.0),
        ("A \u2014 B", "A\u2212B", 1.0),  # a long dash, a minus
        ('SAY "HI"', "SAY \u201eHI\u201c", 1.0),
        ("\u00abHI\u00bb", "\u300cHI\u300d", 1.0),
        ('5"', "5\u2033", 1.0),
        ("WAIT...", "WAIT\u2026", 1.0),
        ("WAIT...", "WAIT\u22ef", 1.0),
        ("A-B", "A'B", 2 / 3),  # one for the other
    ],
)
def test_match_of_one_text_is_one_minus_the_normalised_edit_distance(
    read: str, wanted: str, score: float
) -> None:
    assert match_texts(read, [wanted]) == pytest.approx(score)


def test_match_ignores_words_beside_the_text_unless_asked_otherwise() -> None:
    # GRAND and DAY, 8 of 12 letters, are not asked for: 1 - 0.5 * 8 / 12.
    assert match_texts("GRAND OPEN DAY", ["OPEN"]) == 1.0
    penalised = match_texts("GRAND OPEN DAY", ["OPEN"], extra_text_penalty=0.5)
    assert penalised == pytest.approx(2 / 3)


def test_match_takes_no_penalty_where_nothing_else_was_read() -> None:
    assert match_texts("OPEN", ["OPEN"], extra_text_penalty=1.0) == 1.0
    # 0.75 for the letter; the whole word was taken, so none of it is extra.
    assert match_texts("OPFN", ["OPEN"], extra_text_penalty=1.0) == 0.75
    assert match_texts("", ["OPEN"], extra_text_penalty=1.0) == 0.0


def test_match_finds_a_text_over_several_words_and_lines() -> None:
    assert match_texts("THE TRANS\nATLANTIC IPA 330", ["TRANSATLANTIC IPA"]) == 1.0
    # GRAND alone is 5 of the 12 letters of GRANDOPENING.
    assert match_texts("GRAND", ["GRAND OPENING"]) == pytest.approx(5 / 12)


def test_match_does_not_join_words_that_are_not_neighbours() -> None:
    # GRANDBIGOPENING has 3 letters too many of 15: 0.8; GRAND or OPENING alone less.
    assert match_texts("GRAND BIG OPENING", ["GRAND OPENING"]) == pytest.approx(0.8)


def test_match_does_not_join_words_over_one_that_another_text_took() -> None:
    # Of AB only A is left beside a gap: 5 of 5 letters and 1 of 2.
    assert match_texts("A CCCCC B", ["AB", "CCCCC"]) == pytest.approx(6 / 7)


def test_match_takes_a_longer_stretch_where_that_is_more_alike() -> None:
    # ABCDxxxx has half of the 8 letters; with EFGH 4 of 12 are too many.
    assert match_texts("ABCDxxxx EFGH", ["ABCDEFGH"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("read", ["UP DOWN", "DOWN UP", "DOWN\nUP", "x DOWN y UP z"])
def test_match_of_several_texts_takes_them_in_any_order(read: str) -> None:
    assert match_texts(read, ["UP", "DOWN"]) == 1.0


def test_match_of_several_texts_weighs_each_by_its_length() -> None:
    # DOWN is 4 of the 6 letters asked for.
    assert match_texts("DOWN", ["UP", "DOWN"]) == pytest.approx(4 / 6)
    # And of UP and DOVN, 2 * 1 + 4 * 0.75 of 6.
    assert match_texts("UP DOVN", ["UP", "DOWN"]) == pytest.approx(5 / 6)


def test_match_needs_a_text_twice_that_is_asked_for_twice() -> None:
    assert match_texts("OPEN", ["OPEN", "OPEN"]) == 0.5
    assert match_texts("OPEN OPEN", ["OPEN", "OPEN"]) == 1.0


def test_match_gives_no_letter_to_two_texts() -> None:
    # OPEN takes the word; of PEN nothing is left.
    assert match_texts("OPEN", ["OPEN", "PEN"]) == pytest.approx(4 / 7)


def test_match_leaves_a_word_to_the_text_that_gains_most_by_it() -> None:
    # OPENING HOURS is nowhere, and all but unlike CLOSED, which is there: 6 of 18 letters.
    assert match_texts("CLOSED", ["OPENING HOURS", "CLOSED"]) == pytest.approx(6 / 18)
    # The longer text gains 8 of 9 letters by its own words, the shorter one 4 by the same word.
    assert match_texts("OPEN DAILX OPEN", ["OPEN", "OPEN DAILY"]) == pytest.approx(12 / 13)


def test_match_takes_a_whole_word_before_pieces_of_the_same_letters() -> None:
    assert match_texts("A B AB", ["A", "B", "AB"]) == 1.0


@pytest.mark.parametrize(
    ("read", "wanted", "score"),
    [
        ("営業中", ["営業中"], 1.0),
        ("本日営業中", ["営業中"], 1.0),  # found in a line without spaces
        ("本日営業中です", ["本日", "営業中"], 1.0),
        ("営業由", ["営業中"], 2 / 3),
        ("東京 Tower", ["Tower", "東京"], 1.0),
        ("東京Tower", ["Tower"], 1.0),  # scripts side by side
        ("ガラス", ["ｶﾞﾗｽ"], 1.0),  # half-width kana
        ("カ\u3099ラス", ["ガラス"], 1.0),  # the voicing mark as a character of its own
    ],
)
def test_match_finds_text_of_scripts_without_spaces(
    read: str, wanted: list[str], score: float
) -> None:
    assert match_texts(read, wanted) == pytest.approx(score)


def test_match_counts_case_only_if_asked() -> None:
    assert match_texts("open", ["Open"]) == 1.0
    assert match_texts("open", ["Open"], is_case_sensitive=True) == 0.75
    assert match_texts("Open", ["Open"], is_case_sensitive=True) == 1.0


def test_match_does_not_join_words_of_different_paragraphs() -> None:
    assert match_texts("GRAND\nOPENING", ["GRAND OPENING"]) == 1.0
    # OPENING alone is 7 of 12 letters.
    assert match_texts("GRAND\n\nOPENING", ["GRAND OPENING"]) == pytest.approx(7 / 12)


def box(text: str, column: int, row: int) -> TextBox:
    """Columns and rows are 30 apart."""
    left, top = 30.0 * column, 30.0 * row
    return TextBox(text, left, top, left + 25.0, top + 20.0)


def test_match_boxes_reads_columns() -> None:
    boxes = [box("Grand", 0, 0), box("Live", 1, 0), box("Opening", 0, 1), box("Music", 1, 1)]
    match = match_boxes(boxes, ["LIVE MUSIC", "GRAND OPENING"])
    assert match.score == 1.0
    # In the order of assignment: the longest first.
    assert match.reading == "Grand Opening\n\nLive Music"
    assert [[match.boxes[word].text for word in span.words] for span in match.spans] == [
        ["Grand", "Opening"],
        ["Live", "Music"],
    ]
    # Three wrong letters of GRANDOPENING, 12 of 21 letters asked for.
    boxes[2] = box("OpenXXX", 0, 1)
    assert match_boxes(boxes, ["GRAND OPENING", "LIVE MUSIC"]).score == pytest.approx(18 / 21)


def test_match_boxes_reads_each_text_in_an_order_of_its_own() -> None:
    # The first text in a row, above the two others in columns.
    words = (("GRAND", "OPENING"), ("LIVE", "FREE"), ("MUSIC", "ENTRY"))
    boxes = [box(text, x, y) for y, row in enumerate(words) for x, text in enumerate(row)]
    match = match_boxes(boxes, ["FREE ENTRY", "GRAND OPENING", "LIVE MUSIC"])
    assert match.score == 1.0
    assert match.reading == "GRAND OPENING\n\nFREE ENTRY\n\nLIVE MUSIC"


def test_match_boxes_keeps_rows_that_serve_as_well() -> None:
    boxes = [box("Price\uff1a", 0, 0), box("3", 1, 0), box("Tea", 0, 1), box("4", 1, 1)]
    match = match_boxes(boxes, ["TEA"])
    assert (match.score, match.reading) == (1.0, "Price\uff1a 3 Tea 4")
    assert match_boxes([], ["TEA"]).reading == ""
    assert match_boxes([], ["TEA"]).score == 0.0


def test_match_boxes_does_not_join_what_is_not_neighbouring_in_any_order() -> None:
    # From corner to corner: OPENING alone counts, 7 of 12 letters.
    boxes = [box("GRAND", 0, 0), box("XXXXXXX", 1, 0), box("YYYYYYY", 0, 1), box("OPENING", 1, 1)]
    assert match_boxes(boxes, ["GRAND OPENING"]).score == pytest.approx(7 / 12)


def test_match_boxes_writes_words_between_those_taken_as_they_were_read() -> None:
    # TEA takes its word from the middle of a box, LIVE MUSIC stands in a column.
    boxes = [box("New Tea \u6771\u4eac", 0, 0), box("Live", 1, 0), box("in", 2, 0)]
    boxes += [box("today", 0, 1), box("Music", 1, 1)]
    match = match_boxes(boxes, ["LIVE MUSIC", "TEA"])
    assert match.reading == "Live Music\n\nTea\n\nNew\n\n\u6771\u4eac\n\nin today"
    assert match.score == 1.0


# Few letters, so that texts overlap and tie.
LETTERS = st.text("ABab", min_size=1, max_size=4)
TEXTS = st.lists(LETTERS, min_size=1, max_size=4)
READ = st.lists(LETTERS, max_size=5).map(" ".join)
PENALTY = st.floats(0, 1)


@settings(max_examples=60, derandomize=True)
@given(
    READ,
    TEXTS.flatmap(lambda texts: st.tuples(st.just(texts), st.permutations(texts))),
    st.booleans(),
    PENALTY,
)
def test_match_does_not_depend_on_the_order_of_the_texts(
    read: str, texts: tuple[list[str], list[str]], is_case: bool, penalty: float
) -> None:
    first, second = (
        match_texts(read, wanted, is_case_sensitive=is_case, extra_text_penalty=penalty)
        for wanted in texts
    )
    assert first == second


PLACES = st.tuples(st.integers(0, 2), st.integers(0, 2))
PAGES = st.dictionaries(PLACES, st.text("ABab \u00bd\uff40\u6f22", max_size=4), max_size=6)


@settings(max_examples=200, derandomize=True)
@given(PAGES, TEXTS, st.booleans(), PENALTY)
def test_match_boxes_scores_as_its_reading_does_and_no_lower_than_rows(
    page: dict[tuple[int, int], str], texts: list[str], is_case: bool, penalty: float
) -> None:
    boxes = [box(text, *place) for place, text in page.items()]

    def in_words(read: str) -> float:
        return match_texts(read, texts, is_case_sensitive=is_case, extra_text_penalty=penalty)

    match = match_boxes(boxes, texts, is_case_sensitive=is_case, extra_text_penalty=penalty)
    assert match.score == pytest.approx(in_words(match.reading))
    rows = " ".join(boxes[index].text for index in reading_orders(boxes)[0])
    assert match.score >= in_words(rows)
