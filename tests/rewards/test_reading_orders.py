from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rewards.terms.reading_orders import (
    Box,
    TextBox,
    cells_around,
    in_reading_order,
    reading_orders,
    text_box,
)


def page(drawing: str) -> list[TextBox]:
    """Words as they stand in lines of text, 10 pixels a letter and 20 a line."""
    return [
        TextBox(word, left=10.0 * start, top=20.0 * row, right=10.0 * stop, bottom=20.0 * row + 16)
        for row, line in enumerate(drawing.splitlines())
        for word, start, stop in words_of(line)
    ]


def words_of(line: str) -> list[tuple[str, int, int]]:
    found, place = [], 0
    for word in line.split():
        start = line.index(word, place)
        place = start + len(word)
        found.append((word, start, place))
    return found


def read(boxes: list[TextBox]) -> list[str]:
    return [" ".join(boxes[index].text for index in order) for order in reading_orders(boxes)]


def test_text_box_is_the_upright_rectangle_around_the_corners() -> None:
    box = text_box("AB", np.array([[5.0, 0.0], [20.0, 4.0], [18.0, 12.0], [3.0, 8.0]]))
    # The text's halves meet at (12.5, 2) above and (10.5, 10) below.
    letters = (Box(3.0, 0.0, 12.5, 10.0), Box(10.5, 2.0, 20.0, 12.0))
    assert box == TextBox("AB", left=3.0, top=0.0, right=20.0, bottom=12.0, letters=letters)


def test_text_box_divides_text_halfway_between_its_letters() -> None:
    corners = np.array([[0.0, 0.0], [100.0, 0.0], [100.0, 8.0], [0.0, 8.0]])
    box = text_box("ABC", corners, cells_around(np.array([0.2, 0.4, 0.7])))
    # A reaches as far to the left as to the right, and C as far to the right.
    edges = [0.1, 0.3, 0.55, 0.85]
    assert [letter.left for letter in box.letters] == pytest.approx([100 * x for x in edges[:-1]])
    assert [letter.right for letter in box.letters] == pytest.approx([100 * x for x in edges[1:]])
    # But not over the edge.
    box = text_box("AB", corners, cells_around(np.array([0.1, 0.9])))
    assert box.letters == (Box(0.0, 0.0, 50.0, 8.0), Box(50.0, 0.0, 100.0, 8.0))
    assert text_box("A", corners, cells_around(np.array([0.3]))).letters == (
        Box(0.0, 0.0, 100.0, 8.0),
    )


@pytest.mark.parametrize(
    ("turns", "first"),
    [(0, (0.0, 0.0, 2.0, 20.0)), (-1, (0.0, 0.0, 4.0, 10.0)), (1, (0.0, 10.0, 4.0, 20.0))],
    ids=["to the right", "downwards", "upwards"],
)
def test_text_box_follows_the_text_from_the_first_corner(
    turns: int, first: tuple[float, float, float, float]
) -> None:
    upright = TextBox("AB", 0.0, 0.0, 4.0, 20.0)
    box = text_box("AB", np.roll(upright.corners, turns, axis=0))
    assert box.letters[0] == first


def test_letters_share_a_box_along_its_longer_side() -> None:
    wide, tall = TextBox("AB", 0.0, 0.0, 20.0, 4.0), TextBox("AB", 0.0, 0.0, 4.0, 20.0)
    assert wide.letter_boxes() == ((0.0, 0.0, 10.0, 4.0), (10.0, 0.0, 20.0, 4.0))
    assert tall.letter_boxes() == ((0.0, 0.0, 4.0, 10.0), (0.0, 10.0, 4.0, 20.0))
    # What the engine said counts.
    letters = (Box(0.0, 0.0, 5.0, 4.0), Box(5.0, 0.0, 20.0, 4.0))
    assert replace(wide, letters=letters).letter_boxes() == letters


def test_rows_are_lines_from_left_to_right() -> None:
    boxes = [
        TextBox("below", left=0.0, top=40.0, right=100.0, bottom=60.0),
        TextBox("right", left=50.0, top=8.0, right=90.0, bottom=28.0),  # not quite level
        TextBox("left", left=0.0, top=12.0, right=40.0, bottom=32.0),
    ]
    assert read(boxes)[0] == "left right below"


def test_rows_are_separate_lines_in_small_images() -> None:
    # 8 pixels apart: RapidOCR's own order takes less than 10 for one line.
    upper = TextBox("A", left=20.0, top=0.0, right=26.0, bottom=6.0)
    lower = TextBox("B", left=0.0, top=8.0, right=6.0, bottom=14.0)
    assert read([lower, upper])[0] == "A B"


@pytest.mark.parametrize("drawing", ["", "OPEN", "ONE TWO", "ONE\nTWO\nTHREE", "  ONE\nANOTHER"])
def test_reading_orders_of_one_column_or_line_are_one(drawing: str) -> None:
    assert read(page(drawing)) == [" ".join(drawing.split())]


@pytest.mark.parametrize(
    ("drawing", "order"),
    [
        ("GRAND    LIVE\nOPENING  MUSIC", "GRAND OPENING LIVE MUSIC"),
        ("A1   B1  C1\nA2   B2\nA3       C3", "A1 A2 A3 B1 B2 C1 C3"),
        # Beside lines, between them, and level with one.
        ("GRAND\n         SALE\nOPENING", "GRAND OPENING SALE"),
        ("GRAND    SALE\nOPENING", "GRAND OPENING SALE"),
        # A heading and a last line divide the columns from the rest, not the columns' lines.
        ("SUMMER_FESTIVAL\n A1    B1\n A2    B2\nBEGINS_AT_NOON", "A1 A2 B1 B2"),
        # Two blocks of columns at different places.
        ("A1  B1\nA2  B2\nHEADING\nC1     D1\nC2     D2", "A1 A2 B1 B2 HEADING C1 C2 D1 D2"),
        # Columns within a column.
        ("LEFT   A1 B1\nLEFT2  A2 B2\n       WIDE_ONE", "LEFT LEFT2 A1 A2 B1 B2 WIDE_ONE"),
    ],
)
def test_reading_orders_have_columns(drawing: str, order: str) -> None:
    assert any(order in found for found in read(page(drawing)))


def test_columns_are_divided_where_boxes_touch() -> None:
    def box(text: str, left: float, top: float, width: float = 52.0) -> TextBox:
        return TextBox(text, left, top, left + width, top + 20.0)

    # They overlap by 8 pixels: less than a quarter of the height of both.
    boxes = [
        box("A1", 0.0, 30.0),
        box("B1", 44.0, 30.0),
        box("A2", 0.0, 60.0),
        box("B2", 44.0, 60.0),
    ]
    across = [box("TOP", 0.0, 0.0, width=96.0), box("END", 0.0, 90.0, width=96.0)]
    assert "TOP A1 A2 B1 B2 END" in read([*boxes, *across])


@pytest.mark.parametrize(
    ("drawing", "order"),
    [
        # SALE is beside one line and above the other, and no gap reaches from top to bottom.
        ("   GRAND  SALE\nOPENINGDAYS", "GRAND OPENINGDAYS SALE"),  # middles 0 apart, SALE 30
        ("GRAND SALE\nOPENINGSDAYS", "GRAND OPENINGSDAYS SALE"),  # flush left, SALE 20
        ("  OPENINGS\nSALE  HERE", "SALE OPENINGS HERE"),  # flush right, SALE 20
        # SALE is nearer to GRAND than OPENING is, but not above or below it.
        ("GRAND\n      SALE\n\n\nOPENING", "GRAND OPENING SALE"),
    ],
)
def test_stacks_keep_lines_together_that_have_something_beside_them(
    drawing: str, order: str
) -> None:
    assert order in read(page(drawing))


def test_stacks_take_the_nearer_of_lines_that_are_flush() -> None:
    first, badge, second, third = page("GRAND SALE\nOPENINGS\nTODAY")
    assert "GRAND OPENINGS TODAY SALE" in read([first, third, second, badge])


def test_reading_orders_of_tall_boxes_begin_at_the_right_or_are_turned() -> None:
    def tall(text: str, left: float, top: float) -> TextBox:
        return TextBox(text, left, top, left + 20.0, top + 60.0)

    vertical = [tall("CC", 0.0, 0.0), tall("A", 40.0, 0.0), tall("BB", 40.0, 70.0)]
    assert "A BB CC" in read(vertical)
    # Turned to the left, a line goes upwards, and the next one is at its right.
    turned = [tall("OPENING", 0.0, 0.0), tall("GRAND", 0.0, 70.0), tall("TODAY", 30.0, 20.0)]
    assert "GRAND OPENING TODAY" in read(turned)


@pytest.mark.parametrize("text", ["7", "11"])
def test_a_vertical_box_leaves_the_order_of_horizontal_ones(text: str) -> None:
    sale, summer = page("SALE\nSUMMER")
    narrow = TextBox(text, 300.0, 60.0, 310.0, 90.0)
    assert not [order for order in read([sale, summer, narrow]) if "SUMMER SALE" in order]


HELLO, WORLD = "\u0645\u0631\u062d\u0628\u0627", "\u0628\u0627\u0644\u0639\u0627\u0644\u0645"
MARKET, NIGHT = "\u0633\u0648\u0642", "\u0627\u0644\u0644\u064a\u0644"


@pytest.mark.parametrize(
    ("drawing", "orders"),
    [
        (f"{WORLD} {HELLO}", [f"{HELLO} {WORLD}"]),
        (f"{HELLO}\n{WORLD}", [f"{HELLO} {WORLD}"]),
        # A number stands where the words around it are read.
        (f"{WORLD} 24 {HELLO}", [f"{HELLO} 24 {WORLD}"]),
        # Columns begin at the right.
        (
            f"{NIGHT}    {HELLO}\n{MARKET}    {WORLD}",
            [f"{HELLO} {NIGHT} {WORLD} {MARKET}", f"{HELLO} {WORLD} {NIGHT} {MARKET}"],
        ),
        # With both directions, a line may be read either way; that with most letters comes first.
        (f"{WORLD} {HELLO} NOW OPEN", [f"NOW OPEN {HELLO} {WORLD}", f"{HELLO} {WORLD} NOW OPEN"]),
        (f"OPEN NOW {HELLO}", [f"OPEN NOW {HELLO}", f"{HELLO} OPEN NOW"]),
    ],
    ids=ascii,
)
def test_words_from_right_to_left_are_read_in_their_direction(
    drawing: str, orders: list[str]
) -> None:
    assert sorted(read(page(drawing))) == sorted(orders)


def test_stacks_of_words_from_right_to_left_begin_at_the_right() -> None:
    # NIGHT is beside one line and above the other, and no gap reaches from top to bottom.
    drawing = f"{NIGHT} {HELLO}\n    {WORLD}{MARKET}"
    assert f"{HELLO} {WORLD}{MARKET} {NIGHT}" in read(page(drawing))


def test_a_line_that_was_read_from_left_to_right_is_put_into_the_order_of_reading() -> None:
    def drawn(text: str) -> TextBox:
        return TextBox(text, 0.0, 0.0, 10.0 * len(text), 8.0)

    (box,) = in_reading_order(drawn(f"!12:30 ({HELLO[::-1]}"))
    # Letters stand where they were drawn; numbers keep their direction, brackets turn round.
    assert box.text == f"{HELLO}) 12:30!"
    assert [round(letter.left) for letter in box.letters] == [
        *(120, 110, 100, 90, 80),
        *(70, 60),
        *(10, 20, 30, 40, 50),
        0,
    ]
    left, right = in_reading_order(drawn(f"OPEN {HELLO[::-1]}"))
    assert (left.text.strip(), round(left.left), left.right) == ("OPEN", 0.0, 40.0)
    assert (right.text.strip(), right.left, round(right.right)) == (HELLO, 40.0, 100.0)
    assert in_reading_order(drawn("OPEN")) == [drawn("OPEN")]
