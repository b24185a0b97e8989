"""Say which part of a score each place of an image earned, on a grid of places.

A place is a cell of a grid of h x w equal cells that covers the image. The parts of a score add
up to it, except for a rest that belongs to the whole image.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

_POINT = 1e-9
"""Sides of boxes below this, in places, count as 0."""


@dataclass(frozen=True)
class ScoreBox:
    """A part of a score that was earned in a box of the image, such as a letter that was read.

    Attributes:
        value: Part of the score, of either sign.
        left: Left edge of the box, in pixels from the image's left edge.
        top: Upper edge, in pixels from the image's upper edge.
        right: Right edge, at least `left`.
        bottom: Lower edge, at least `top`.
        text: What stands in the box, for people.
        kind: What the box is compared with: boxes of the same kind in the group's other images,
            wherever they stand, such as the third letter of a text. Empty: whatever is in the same
            place there, which is right only if the prompt fixes the layout.
    """

    value: float
    left: float
    top: float
    right: float
    bottom: float
    text: str = ""
    kind: str = ""


ScoreBoxes = tuple[tuple[ScoreBox, ...], ...]
"""Boxes of each of N images."""

ScoreMap = Float32[Tensor, "N h w"] | ScoreBoxes
"""Parts of N scores: a map of any resolution that covers the image, or boxes with values."""


@dataclass(frozen=True)
class Grid:
    """A grid of equal places that covers an image."""

    rows: int
    columns: int

    def __len__(self) -> int:
        """Number of places."""
        return self.rows * self.columns


def map_on_grid(
    score_map: ScoreMap, grid: Grid, *, height: int, width: int
) -> Float32[Tensor, "N rows columns"]:
    """Sum up what each place of a grid earned.

    A cell of a map, or a box, that lies in several places is divided between them by area. Boxes
    are cut off at the image's edges, and one without area counts as a point.
    """
    if isinstance(score_map, Tensor):
        rows = overlaps(score_map.shape[1], grid.rows).to(score_map.device)
        columns = overlaps(score_map.shape[2], grid.columns).to(score_map.device)
        return (rows @ score_map.double() @ columns.T).float()
    places = torch.zeros(len(score_map), grid.rows, grid.columns, dtype=torch.float64)
    for place, boxes in zip(places, score_map, strict=True):
        for box in boxes:
            rows = _covered(box.top / height, box.bottom / height, grid.rows)
            columns = _covered(box.left / width, box.right / width, grid.columns)
            place += box.value * rows[:, None] * columns
    return places.float()


def without_kind(boxes: ScoreBoxes) -> ScoreBoxes:
    """Boxes that are compared with the same places of other images."""
    return tuple(tuple(box for box in of_image if not box.kind) for of_image in boxes)


def like_with_like(boxes: ScoreBoxes, is_scored: Sequence[bool]) -> ScoreBoxes:
    """Boxes that have a kind, with their values less the mean of their kind over a group.

    Of the group's images that have such a box, wherever it stands: an image without one has
    nothing to compare, and that the box exists is no merit of its place. The values of each kind
    add up to 0.

    Args:
        boxes: Those of all images of a group.
        is_scored: Whether an image belongs to the group; one that was left out has no boxes.
    """
    compared = tuple(
        tuple(box for box in of_image if box.kind) if is_kept else ()
        for of_image, is_kept in zip(boxes, is_scored, strict=True)
    )
    values: dict[str, list[float]] = {}
    for box in itertools.chain.from_iterable(compared):
        values.setdefault(box.kind, []).append(box.value)
    means = {kind: math.fsum(found) / len(found) for kind, found in values.items()}
    return tuple(
        tuple(replace(box, value=box.value - means[box.kind]) for box in of_image)
        for of_image in compared
    )


def overlaps(cells: int, places: int) -> Float64[Tensor, "places cells"]:
    """Fraction of each of `cells` equal parts of a line that lies in each of `places` equal parts.

    Each column adds up to 1.
    """
    # In units of 1 / (cells * places) of the line, edges are integers, and fractions exact.
    starts = torch.arange(places, dtype=torch.float64)[:, None] * cells
    own_starts = torch.arange(cells, dtype=torch.float64) * places
    ends, own_ends = starts + cells, own_starts + places
    shared = torch.minimum(ends, own_ends) - torch.maximum(starts, own_starts)
    return shared.clamp(min=0) / places


def _covered(start: float, end: float, places: int) -> Float64[Tensor, " places"]:
    """Fraction of an interval that lies in each of `places` equal parts of the line from 0 to 1."""
    start, end = (min(max(edge, 0.0), 1.0) * places for edge in (start, end))
    edges = torch.arange(places, dtype=torch.float64)
    if end - start < _POINT:
        # A box on the last edge belongs to the last place.
        return (edges == min(int((start + end) / 2), places - 1)).to(edges)
    shared = (edges + 1).clamp(max=end) - edges.clamp(min=start)
    return shared.clamp(min=0) / (end - start)


def is_placed_by_mean(score_map: Float32[Tensor, "N h w"], values: Float32[Tensor, " N"]) -> bool:
    """Whether the maps have the scores as their means, where they should have them as sums."""
    if score_map[0].numel() == 1 or not bool((values != 0).any()):
        return False
    means = score_map.double().mean(dim=(1, 2))
    # Relative to the largest score: scores may all be small.
    tolerance = 1e-4 * values.abs().amax().double()
    return bool(((means - values).abs() <= tolerance).all())
