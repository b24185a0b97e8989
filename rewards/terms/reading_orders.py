"""Boxes of text, and the orders in which people read a page."""

from __future__ import annotations

import itertools
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

_MARGIN = 0.25
"""Engines draw boxes larger than the letters. This fraction of a box's shorter side is cut off at
both ends when gaps between boxes are looked for."""

_OF_LETTERS = {"L": False, "R": True, "AL": True}
"""Whether a letter is written from right to left, by its class in Unicode; others are neutral."""
_OF_NUMBERS = {"EN": False, "AN": False}
"""The same for digits, Arabic ones too, within a line of either direction."""
_MIRRORED = str.maketrans("()[]{}<>\u00ab\u00bb", ")(][}{><\u00bb\u00ab")


class Box(NamedTuple):
    """An upright box in pixels, y pointing down."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True)
class TextBox:
    """A piece of text with its upright bounding box, in pixels, y pointing down.

    Attributes:
        letters: Box of each character of the text; empty if the engine did not say.
    """

    text: str
    left: float
    top: float
    right: float
    bottom: float
    letters: tuple[Box, ...] = ()

    @property
    def middle(self) -> tuple[float, float]:
        """Its x and y."""
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2

    @property
    def corners(self) -> Float64[np.ndarray, "4 2"]:
        """(x, y) of its corners, clockwise from the upper left one."""
        left, top, right, bottom = self.left, self.top, self.right, self.bottom
        return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float64)

    def letter_boxes(self) -> tuple[Box, ...]:
        """Box of each character: `letters`, or else equal parts of the box, along its longer side.

        Text in a tall box is taken to run downwards.
        """
        if self.letters:
            return self.letters
        corners = np.roll(self.corners, -1, axis=0) if _is_tall(self) else self.corners
        return text_box(self.text, corners).letters


def text_box(
    text: str,
    corners: Float64[np.ndarray, "4 2"],
    cells: Float64[np.ndarray, "2 letters"] | None = None,
) -> TextBox:
    """Make a text box from the engine's box, which may be tilted.

    Args:
        corners: (x, y) of the corners, clockwise as the text is read: it runs from the first to the
            second, with the fourth and the third below them.
        cells: Where each character begins and ends along the text, 0..1; None: equal parts.
    """
    if cells is None:
        cells = cells_between(np.linspace(0.0, 1.0, len(text) + 1))
    starts, stops = cells
    first, second, third, fourth = corners
    ends = [
        start + fraction[:, None] * (stop - start)
        for start, stop in ((first, second), (fourth, third))
        for fraction in (starts, stops)
    ]
    # Axes: corners, letters, x and y.
    lows, highs = np.min(ends, axis=0).tolist(), np.max(ends, axis=0).tolist()
    letters = tuple(Box(*low, *high) for low, high in zip(lows, highs, strict=True))
    (left, top), (right, bottom) = corners.min(axis=0).tolist(), corners.max(axis=0).tolist()
    return TextBox(text, left=left, top=top, right=right, bottom=bottom, letters=letters)


def cells_between(edges: Float64[np.ndarray, " edges"]) -> Float64[np.ndarray, "2 cells"]:
    """Where cells begin and end, from their edges along the text, rising and cut off at 0 and 1."""
    edges = edges.clip(0, 1)
    return np.stack([edges[:-1], edges[1:]])


def cells_around(centres: Float64[np.ndarray, " cells"]) -> Float64[np.ndarray, "2 cells"]:
    """Cells that reach halfway to the next centre, and as far on the other side at an end."""
    if len(centres) == 1:
        return np.array([[0.0], [1.0]])
    halves = np.diff(centres) / 2
    first, last = centres[:1] - halves[:1], centres[-1:] + halves[-1:]
    return cells_between(np.concatenate([first, centres[:-1] + halves, last]))


def in_reading_order(box: TextBox) -> list[TextBox]:
    """Turn text that an engine read from left to right into the order in which people read it.

    Returns:
        The box, or if it holds text of both directions, a box for each part: which one is read
        first depends on the page.
    """
    directions = _directions(box.text, _OF_LETTERS)
    if True not in directions:
        return [box]
    boxes = []
    for is_from_right, places in _runs(directions, is_from_right=True):
        start, stop = places[0], places[-1] + 1
        text, letters = box.text[start:stop], box.letter_boxes()[start:stop]
        if is_from_right:
            order = _turn(_directions(text, _OF_LETTERS | _OF_NUMBERS), is_from_right=True)
            text = "".join(text[place] for place in order).translate(_MIRRORED)
            letters = tuple(letters[place] for place in order)
        lefts, tops, rights, bottoms = zip(*letters, strict=True)
        boxes.append(TextBox(text, min(lefts), min(tops), max(rights), max(bottoms), letters))
    return boxes


def _directions(text: str, classes: Mapping[str, bool]) -> list[bool | None]:
    return [classes.get(unicodedata.bidirectional(character)) for character in text]


def _count_directions(boxes: Iterable[TextBox]) -> Counter[bool]:
    """Letters that are written from left to right, and from right to left."""
    directions = (each for box in boxes for each in _directions(box.text, _OF_LETTERS))
    return Counter(each for each in directions if each is not None)


def _runs(
    directions: Sequence[bool | None], *, is_from_right: bool
) -> list[tuple[bool, list[int]]]:
    """Places of one direction. Neutral ones have that of both neighbours, or else of the line."""

    def known(directions: Iterable[bool | None]) -> list[bool]:
        found, last = [], is_from_right
        for each in directions:
            last = last if each is None else each
            found.append(last)
        return found

    before, after = known(directions), known(reversed(directions))[::-1]
    resolved = [
        one if one == other else is_from_right for one, other in zip(before, after, strict=True)
    ]
    grouped = itertools.groupby(range(len(resolved)), key=lambda place: resolved[place])
    return [(direction, list(places)) for direction, places in grouped]


def _turn(directions: Sequence[bool | None], *, is_from_right: bool) -> list[int]:
    """Places of a line, from left to right, in the order in which they are read.

    Args:
        is_from_right: Whether the line is read from right to left; parts of the other direction
            keep their own.
    """
    runs = [
        places[::-1] if direction else places
        for direction, places in _runs(directions, is_from_right=is_from_right)
    ]
    return [place for run in (runs[::-1] if is_from_right else runs) for place in run]


def _read_line(parts: Sequence[list[TextBox]], *, is_from_right: bool) -> list[list[TextBox]]:
    """Parts of a page beside each other, from left to right, in the order of reading."""
    counts = [_count_directions(part).most_common(1) for part in parts]
    directions = [count[0][0] if count else None for count in counts]
    return [parts[place] for place in _turn(directions, is_from_right=is_from_right)]


def surest_reading(
    upright: tuple[TextBox, float], turned: Iterable[tuple[TextBox, float]]
) -> tuple[TextBox, float]:
    """Choose among readings of the same box, turned in several ways.

    Args:
        upright: What the engine read, and its confidence, 0..1.
        turned: The same for the box turned in other ways. A single letter does not count: it may be
            a stroke of an upright one.

    Returns:
        The one with the most letters that are likely right, less those that are likely wrong:
        confidence alone may prefer a part of the text, its product with the length repeated
        letters.
    """
    readings = [upright, *(reading for reading in turned if len(reading[0].text) > 1)]
    return max(readings, key=lambda reading: len(reading[0].text) * (2 * reading[1] - 1))


def reading_orders(boxes: Sequence[TextBox]) -> list[tuple[int, ...]]:
    """Orders in which people may read a page, as indices of the boxes, without repetitions.

    - Rows, always the first order: lines over the whole width from top to bottom, each from left to
      right. Words of Arabic script and the like are read from right to left; if a page has words of
      both directions, so may be its lines, and all of these orders come in both.
    - Columns: parts of the page that a vertical gap divides, from left to right. Lines without a
      gap, such as a heading, divide the lines above from those below.
    - Stacks, from left to right: each box is followed by the one below it whose left end, right end
      or middle is nearest. This keeps lines together that have something beside them.
    - Columns from right to left, as in vertical Chinese and Japanese and in lines turned clockwise;
      and the reverse, as in lines turned the other way. Of the whole page only if vertical boxes
      hold most of its letters, else of these boxes alone: otherwise wrong orders of horizontal
      words would be right beside any vertical one. A box with a single letter is not vertical,
      because 1 and ! are higher than wide.
    """
    directions = [direction for direction, _ in _count_directions(boxes).most_common()]
    orders = [
        find(boxes, is_from_right=direction)
        for direction in directions or [False]
        for find in (_rows, _columns, _stacks)
    ]
    vertical = [box for box in boxes if len(box.text) > 1 and _is_tall(box)]
    if vertical:
        is_page_vertical = 2 * _count_letters(vertical) > _count_letters(boxes)
        from_right = _columns(boxes if is_page_vertical else vertical, is_vertical=True)
        orders += [from_right, from_right[::-1]]
    indices = {id(box): index for index, box in enumerate(boxes)}
    return list(dict.fromkeys(tuple(indices[id(box)] for box in order) for order in orders))


def _count_letters(boxes: Sequence[TextBox]) -> int:
    return sum(len(box.text) for box in boxes)


def _is_tall(box: TextBox) -> bool:
    return box.bottom - box.top > box.right - box.left


def _rows(boxes: Sequence[TextBox], *, is_from_right: bool) -> list[TextBox]:
    """A box belongs to a line if its middle is above the bottom of the line's first box.

    Unlike a fixed number of pixels, this works for small and large images.
    """
    lines: list[list[TextBox]] = []
    for box in sorted(boxes, key=lambda box: box.middle[1]):
        if lines and box.middle[1] < lines[-1][0].bottom:
            lines[-1].append(box)
        else:
            lines.append([box])
    read = []
    for line in lines:
        parts = [[box] for box in sorted(line, key=lambda box: box.left)]
        read += [box for (box,) in _read_line(parts, is_from_right=is_from_right)]
    return read


def _columns(
    boxes: Sequence[TextBox], *, is_from_right: bool = False, is_vertical: bool = False
) -> list[TextBox]:
    """A recursive XY-cut, vertical cuts first."""
    parts = _divide_at_vertical_gaps(boxes)
    if is_vertical:
        parts.reverse()
    else:
        parts = _read_line(parts, is_from_right=is_from_right)
    if len(parts) == 1:
        parts = _blocks(boxes)
    if len(parts) == 1:
        return _rows(boxes, is_from_right=is_from_right)
    return [
        box
        for part in parts
        for box in _columns(part, is_from_right=is_from_right, is_vertical=is_vertical)
    ]


def _blocks(boxes: Sequence[TextBox]) -> list[list[TextBox]]:
    """Divide into lines, but keep lines together that a vertical gap divides together."""
    blocks: list[list[TextBox]] = []
    for line in _divide(boxes, lambda box: (box.top, box.bottom)):
        together = [*blocks[-1], *line] if blocks else []
        if len(_divide_at_vertical_gaps(together)) > 1:
            blocks[-1] = together
        else:
            blocks.append(line)
    return blocks


def _divide_at_vertical_gaps(boxes: Sequence[TextBox]) -> list[list[TextBox]]:
    return _divide(boxes, lambda box: (box.left, box.right))


def _divide(
    boxes: Sequence[TextBox], ends: Callable[[TextBox], tuple[float, float]]
) -> list[list[TextBox]]:
    """Divide where no box lies, in the direction of their `ends`."""
    parts: list[list[TextBox]] = []
    reached = 0.0
    for box in sorted(boxes, key=ends):
        margin = _MARGIN * min(box.right - box.left, box.bottom - box.top)
        start, stop = ends(box)
        if parts and start + margin < reached:
            parts[-1].append(box)
            reached = max(reached, stop - margin)
        else:
            parts.append([box])
            reached = stop - margin
    return parts


def _stacks(boxes: Sequence[TextBox], *, is_from_right: bool) -> list[TextBox]:
    pairs = [
        (_distance(upper, lower), above, below)
        for (above, upper), (below, lower) in itertools.permutations(enumerate(boxes), 2)
        if _is_below(lower, upper)
    ]
    next_below: dict[int, int] = {}
    for _, above, below in sorted(pairs):
        if above not in next_below and below not in next_below.values():
            next_below[above] = below
    stacks = []
    for index in sorted(range(len(boxes)), key=lambda index: boxes[index].left):
        stack, place = [], None if index in next_below.values() else index
        while place is not None:
            stack.append(boxes[place])
            place = next_below.get(place)
        if stack:
            stacks.append(stack)
    return [box for stack in _read_line(stacks, is_from_right=is_from_right) for box in stack]


def _is_below(lower: TextBox, upper: TextBox) -> bool:
    is_under = max(lower.left, upper.left) < min(lower.right, upper.right)
    return is_under and lower.middle[1] >= upper.bottom


def _distance(upper: TextBox, lower: TextBox) -> float:
    """From the bottom of one box to the top of the other, between left ends, middles or right ends.

    The shortest of the three, as lines may be flush left, centred, or flush right.
    """
    shifts = (
        upper.left - lower.left,
        upper.middle[0] - lower.middle[0],
        upper.right - lower.right,
    )
    return lower.top - upper.bottom + min(map(abs, shifts))
