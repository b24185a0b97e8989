from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.terms.letters import place_score
from rewards.terms.reading_orders import TextBox
from rewards.terms.text_matching import match_boxes

# Few letters, so that texts overlap and tie; and some of which the folded form has more or fewer.
LETTERS = "ABab \u00bd\uff40\u6f22\ufb01\u2026e\u0301"
PLACES = st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans())
PAGES = st.dictionaries(PLACES, st.text(LETTERS, max_size=6), max_size=6).map(
    lambda texts: [box(text, *place) for place, text in texts.items()]
)
TEXTS = st.lists(st.text("ABab", min_size=1, max_size=5), min_size=1, max_size=4)


def box(text: str, row: int, column: int, is_tall: bool) -> TextBox:
    left, top = 60.0 * column, 60.0 * row
    width, height = (20.0, 50.0) if is_tall else (50.0, 20.0)
    return TextBox(text, left, top, left + width, top + height)


@settings(max_examples=500, derandomize=True)
@given(PAGES, TEXTS, st.booleans(), st.floats(0, 1))
def test_pieces_add_up_to_the_score(
    boxes: list[TextBox], texts: list[str], is_case: bool, penalty: float
) -> None:
    match = match_boxes(boxes, texts, is_case_sensitive=is_case, extra_text_penalty=penalty)
    pieces = place_score(match, is_case_sensitive=is_case, extra_text_penalty=penalty)
    values = [piece.value for piece in pieces]
    assert math.isclose(math.fsum(values), match.score, rel_tol=1e-12, abs_tol=1e-12)
