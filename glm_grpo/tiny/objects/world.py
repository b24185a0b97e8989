"""The synthetic world of the embedded Janus: one to four coloured shapes on a plain ground.

An image has 8 x 8 cells of 16 pixels. A shape fills a block of 2 x 2 or 3 x 3 of them, anywhere;
blocks do not overlap. Equal cells of different shapes are one cell: a large square has the corners
of a small one.

What a prompt asks for has GenEval's form: classes, numbers, colours and positions.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

CELL = 16
GRID = 8
SIZE = CELL * GRID

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (214, 40, 40),
    "orange": (245, 130, 32),
    "yellow": (250, 208, 50),
    "green": (40, 150, 70),
    "blue": (40, 90, 200),
    "purple": (135, 60, 170),
}
COLOUR_NAMES = tuple(COLOURS)
GROUND = (238, 238, 234)
SIDES = (2, 3)
"""Height and width of a shape, in cells."""
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
"""Relations of one shape to another, with their opposites."""
CAPTION_FORM = (
    "a photo of (a [COLOUR] SHAPE | two|three|four [COLOUR] SHAPEs | "
    "a [COLOUR] SHAPE left of|right of|above|below a [COLOUR] SHAPE | "
    "a [COLOUR] SHAPE, a [COLOUR] SHAPE and a [COLOUR] SHAPE)"
)
"""Form of all captions: SHAPE is one of `SHAPES`, COLOUR of `COLOUR_NAMES`; lists have two to four
shapes, all different."""

_NUMBERS = {1: "a", 2: "two", 3: "three", 4: "four"}
_HELD_OUT_IN = 8
"""One in this many captions is held out."""
_KINDS_OF_SIDE = {2: 0, 3: 4}
_KINDS = 13
"""Cells of a shape in both sizes."""
_OVERSAMPLING = 8
_MARGIN = 2
"""Pixels between a shape and its block."""
_TRIES = 200


@dataclass(frozen=True)
class Wanted:
    """Shapes of one class that an image should show.

    Attributes:
        shape: One of `SHAPES`.
        count: How many.
        colour: One of `COLOUR_NAMES`; None: any.
    """

    shape: str
    count: int = 1
    colour: str | None = None


@dataclass(frozen=True)
class Request:
    """What an image should show.

    Attributes:
        wanted: Shapes of different classes, in the order of the caption.
        relation: Where the first one is, seen from the second; None: anywhere.
    """

    wanted: tuple[Wanted, ...]
    relation: str | None = None

    @property
    def tag(self) -> str:
        """GenEval's name for prompts of this kind; `objects` for more than two classes."""
        first = self.wanted[0]
        if self.relation is not None:
            return "position"
        if len(self.wanted) > 2:
            return "objects"
        if len(self.wanted) == 2:
            return "two_object" if first.colour is None else "color_attr"
        if first.count > 1:
            return "counting"
        return "single_object" if first.colour is None else "colors"

    @property
    def number(self) -> int:
        """Number of shapes."""
        return sum(each.count for each in self.wanted)


@dataclass(frozen=True)
class Shape:
    """One shape of an image.

    Attributes:
        shape: One of `SHAPES`.
        colour: One of `COLOUR_NAMES`.
        side: Height and width in cells, one of `SIDES`.
        top: First row of its block.
        left: First column of its block.
    """

    shape: str
    colour: str
    side: int
    top: int
    left: int

    def touches(self, other: Shape) -> bool:
        """Whether both blocks have a cell in common."""
        return (
            self.top < other.top + other.side
            and other.top < self.top + self.side
            and self.left < other.left + other.side
            and other.left < self.left + self.side
        )


def caption(request: Request) -> str:
    """Sentence that describes what an image should show."""
    phrases = [_phrase(each) for each in request.wanted]
    if request.relation is not None:
        return f"a photo of {phrases[0]} {request.relation} {phrases[1]}"
    *some, last = phrases
    listed = f"{', '.join(some)} and {last}" if some else last
    return f"a photo of {listed}"


def metadata(request: Request) -> Mapping[str, Any]:
    """What a prompt's row says beside the prompt, as in GenEval: tag, include and exclude."""
    include: list[dict[str, Any]] = []
    for each in request.wanted:
        condition: dict[str, Any] = {"class": each.shape, "count": each.count}
        if each.colour is not None:
            condition["color"] = each.colour
        include.append(condition)
    if request.relation is not None:
        # As in GenEval, the other shape is the first condition.
        include.reverse()
        include[1]["position"] = [request.relation, 0]
    row: dict[str, Any] = {"tag": request.tag, "include": include}
    if request.tag == "counting":
        first = request.wanted[0]
        row["exclude"] = [{"class": first.shape, "count": first.count + 1}]
    return row


@functools.cache
def all_requests() -> tuple[Request, ...]:
    """Everything that a prompt can ask for, each once."""
    any_colour = (None, *COLOUR_NAMES)
    pairs: list[tuple[str | None, str | None]] = [(None, None), *permutations(COLOUR_NAMES, 2)]
    found = [
        Request((Wanted(shape, count, colour),))
        for shape in SHAPES
        for count in (1, 2, 3, 4)
        for colour in any_colour
    ]
    for shapes in permutations(SHAPES, 2):
        for pair in pairs:
            both = (Wanted(shapes[0], 1, pair[0]), Wanted(shapes[1], 1, pair[1]))
            found += [Request(both, relation) for relation in (None, *OPPOSITE)]
    for number in (3, 4):
        for several in permutations(SHAPES, number):
            found.append(Request(tuple(map(Wanted, several))))
            found += [
                Request(tuple(map(Wanted, several, (1,) * number, colours)))
                for colours in product(COLOUR_NAMES, repeat=number)
                if len(set(colours)) == number
            ]
    return tuple(found)


def is_held_out(request: Request) -> bool:
    """Whether no image with this caption was ever trained on: about one caption in eight.

    Captions that name one shape and nothing else are never held out.
    """
    if request.tag == "single_object":
        return False
    return zlib.crc32(caption(request).encode()) % _HELD_OUT_IN == 0


@functools.cache
def requests_by_tag(*, held_out: bool) -> Mapping[str, tuple[Request, ...]]:
    """`all_requests` that are held out, or the others, by their tag.

    Requests for three and for four classes have a tag each, so that both are drawn as often.
    """
    by_tag: dict[str, list[Request]] = {}
    for request in all_requests():
        if is_held_out(request) == held_out:
            by_tag.setdefault(f"{request.tag}-{len(request.wanted)}", []).append(request)
    return {tag: tuple(requests) for tag, requests in by_tag.items()}


def random_request(rng: np.random.Generator) -> Request:
    """Draw a kind of request, then one of those that are not held out."""
    requests = list(requests_by_tag(held_out=False).values())
    some = requests[rng.integers(len(requests))]
    return some[rng.integers(len(some))]


def is_caption(text: str) -> bool:
    """Whether `caption` can return this text for some request."""
    return text in _captions()


def arrange(request: Request, rng: np.random.Generator) -> tuple[Shape, ...]:
    """Draw an arrangement of shapes that has what is wanted, and nothing else."""
    while True:
        shapes: list[Shape] = []
        for wanted in (each for each in request.wanted for _ in range(each.count)):
            placed = _place(wanted, shapes, rng)
            if placed is None:
                break
            shapes.append(placed)
        if len(shapes) == request.number and (
            request.relation is None or is_related(shapes[0], shapes[1], request.relation)
        ):
            return tuple(shapes)


def is_related(shape: Shape, other: Shape, relation: str) -> bool:
    """Whether a shape is left of, right of, above or below another, by the rule of GenEval."""
    offsets = [
        (shape.left + shape.side / 2) - (other.left + other.side / 2),
        (shape.top + shape.side / 2) - (other.top + other.side / 2),
    ]
    margin = 0.1 * (shape.side + other.side)
    length = math.hypot(*offsets)
    rest = [math.copysign(max(abs(each) - margin, 0.0), each) / length for each in offsets]
    axis, sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}[
        relation
    ]
    return sign * rest[axis] > 0.5


def careless(request: Request, rng: np.random.Generator, rate: float) -> Request:
    """What an image with this caption shows where captions are written without care.

    With probability `rate` each: two classes exchange their colours, a colour is its neighbour in
    `COLOURS`, a number is one more or one less, a relation is the opposite, one of several classes
    is missing. Mistakes are those that a reader might make, and not any: guidance multiplies what
    is likely, so that a mistake that is spread over many colours would never be drawn.
    """
    wanted = list(request.wanted)
    if len(wanted) > 1 and rng.random() < rate:
        first, second = rng.choice(len(wanted), size=2, replace=False)
        one, other = wanted[first], wanted[second]
        wanted[first] = replace(one, colour=other.colour)
        wanted[second] = replace(other, colour=one.colour)
    for index, each in enumerate(wanted):
        if each.colour is not None and rng.random() < rate / len(wanted):
            place = COLOUR_NAMES.index(each.colour) + (1 if rng.random() < 0.5 else -1)
            each = replace(each, colour=COLOUR_NAMES[place % len(COLOUR_NAMES)])
        if each.count > 1 and rng.random() < rate:
            step = 1 if each.count == 2 or (each.count == 3 and rng.random() < 0.5) else -1
            each = replace(each, count=each.count + step)
        wanted[index] = each
    if len(wanted) > 2 and rng.random() < rate:
        del wanted[rng.integers(len(wanted))]
    relation = request.relation
    if relation is not None and rng.random() < rate:
        relation = OPPOSITE[relation]
    return Request(tuple(wanted), relation)


def scene_cells(shapes: Sequence[Shape]) -> Int64[Tensor, "8 8"]:
    """Cell ids of an image, row by row."""
    grid = torch.zeros(GRID, GRID, dtype=torch.int64)
    for each in shapes:
        first = _first_drawing(each.shape, each.colour, each.side)
        block = torch.arange(first, first + each.side**2).view(each.side, each.side)
        rows = slice(each.top, each.top + each.side)
        grid[rows, each.left : each.left + each.side] = block
    return _cell_of_drawing()[grid]


def draw_cells(cells: Int64[Tensor, "*B h w"]) -> UInt8[Tensor, "*B 3 H W"]:
    """Draw grids of cell ids; H = 16 h, W = 16 w."""
    tiles = cell_atlas()[cells]
    *batch, rows, columns = cells.shape
    lead = len(batch)
    order = (*range(lead), lead + 2, lead, lead + 3, lead + 1, lead + 4)
    return tiles.permute(*order).reshape(*batch, 3, rows * CELL, columns * CELL)


@functools.cache
def cell_atlas() -> UInt8[Tensor, "C 3 16 16"]:
    """Every distinct cell, drawn once; the first one is blank."""
    drawings, cell_of_drawing = _drawings(), _cell_of_drawing()
    atlas = torch.zeros(int(cell_of_drawing.max()) + 1, *drawings.shape[1:], dtype=torch.uint8)
    atlas[cell_of_drawing] = drawings
    return atlas


def cell_parts() -> tuple[list[int], list[int]]:
    """What each cell shows: a part of a shape, and its colour; -1 for blank.

    Returns:
        Index of the part for each of C cells, and of the colour in `COLOUR_NAMES`.
    """
    cell_of_drawing = _cell_of_drawing().tolist()
    parts, colours = [-1] * len(cell_atlas()), [-1] * len(cell_atlas())
    for drawing in reversed(range(1, len(cell_of_drawing))):
        cell = cell_of_drawing[drawing]
        if cell != 0:
            colours[cell], parts[cell] = divmod(drawing - 1, len(SHAPES) * _KINDS)
    return parts, colours


def _phrase(wanted: Wanted) -> str:
    colour = "" if wanted.colour is None else f"{wanted.colour} "
    number = _NUMBERS[wanted.count]
    if wanted.count == 1 and wanted.colour == "orange":
        number = "an"
    return f"{number} {colour}{wanted.shape}{'s' if wanted.count > 1 else ''}"


@functools.cache
def _captions() -> frozenset[str]:
    return frozenset(map(caption, all_requests()))


def _place(wanted: Wanted, shapes: Sequence[Shape], rng: np.random.Generator) -> Shape | None:
    """Draw size and place of a shape, beside the others; None if there is no room."""
    for _ in range(_TRIES):
        side = int(rng.choice(SIDES))
        top, left = rng.integers(GRID - side + 1, size=2)
        colour = wanted.colour or COLOUR_NAMES[rng.integers(len(COLOURS))]
        placed = Shape(wanted.shape, colour, side, int(top), int(left))
        if not any(placed.touches(other) for other in shapes):
            return placed
    return None


def _first_drawing(shape: str, colour: str, side: int) -> int:
    of_colour = len(SHAPES) * _KINDS * COLOUR_NAMES.index(colour)
    return 1 + of_colour + _KINDS * SHAPES.index(shape) + _KINDS_OF_SIDE[side]


@functools.cache
def _cell_of_drawing() -> Int64[Tensor, " D"]:
    """Id of the cell that each drawing shows: equal drawings are one cell."""
    ids: dict[bytes, int] = {}
    drawings = _drawings().numpy()
    return torch.tensor([ids.setdefault(each.tobytes(), len(ids)) for each in drawings])


@functools.cache
def _drawings() -> UInt8[Tensor, "D 3 16 16"]:
    """Blank, then all cells of all shapes: colour by colour, shape by shape, small before large."""
    tiles = [np.full((CELL, CELL, 3), GROUND, dtype=np.uint8)]
    for colour, shape, side in product(COLOURS, SHAPES, SIDES):
        block = np.asarray(draw_shape(shape, COLOURS[colour], side * CELL))
        tiles += [
            block[row : row + CELL, column : column + CELL]
            for row, column in product(range(0, side * CELL, CELL), repeat=2)
        ]
    return torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2).contiguous()


def draw_shape(shape: str, colour: tuple[int, ...], side: int) -> Image.Image:
    """Draw a shape on a block of the ground of `side` x `side` pixels."""
    large = Image.new("RGB", (side * _OVERSAMPLING,) * 2, GROUND)
    draw = ImageDraw.Draw(large)
    low, high = _MARGIN * _OVERSAMPLING, (side - _MARGIN) * _OVERSAMPLING - 1
    middle, radius = (low + high) / 2, (high - low) / 2
    if shape == "circle":
        draw.ellipse((low, low, high, high), fill=colour)
    elif shape == "square":
        draw.rectangle((low, low, high, high), fill=colour)
    elif shape == "triangle":
        draw.polygon([(middle, low), (high, high), (low, high)], fill=colour)
    else:
        points = []
        for index in range(10):
            angle = math.pi * (index / 5 - 0.5)
            length = radius * (1.05 if index % 2 == 0 else 0.45)
            points.append(
                (middle + length * math.cos(angle), middle + length * (0.08 + math.sin(angle)))
            )
        draw.polygon(points, fill=colour)
    return large.resize((side, side), Image.Resampling.BOX)
