from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewards.score_map import (
    Grid,
    ScoreBox,
    is_placed_by_mean,
    like_with_like,
    map_on_grid,
    overlaps,
    without_kind,
)
from rewards.terms import KINDS

SIDES = st.integers(min_value=1, max_value=40)


def test_overlaps_by_hand() -> None:
    # Thirds of a line on halves of it: the middle third lies in both.
    assert overlaps(3, 2).tolist() == [[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]]
    assert overlaps(2, 4).tolist() == [[0.5, 0.0], [0.5, 0.0], [0.0, 0.5], [0.0, 0.5]]


@given(cells=SIDES, places=SIDES)
def test_overlaps_divide_every_cell(cells: int, places: int) -> None:
    found = overlaps(cells, places)
    assert found.shape == (places, cells)
    assert found.min() >= 0
    torch.testing.assert_close(found.sum(dim=0), torch.ones(cells, dtype=torch.float64))
    # Every place is as large as the others.
    shares = torch.full((places,), cells / places, dtype=torch.float64)
    torch.testing.assert_close(found.sum(dim=1), shares)


@given(height=SIDES, width=SIDES, rows=SIDES, columns=SIDES)
def test_maps_keep_their_sums_on_any_grid(height: int, width: int, rows: int, columns: int) -> None:
    parts = torch.randn(2, height, width, generator=torch.Generator().manual_seed(height))
    placed = map_on_grid(parts, Grid(rows, columns), height=8, width=8)
    assert placed.shape == (2, rows, columns)
    torch.testing.assert_close(placed.sum(dim=(1, 2)), parts.sum(dim=(1, 2)), rtol=0, atol=1e-4)


def test_a_map_is_pooled_by_area() -> None:
    parts = torch.zeros(1, 7, 5)
    parts[0, 0, 0] = 1.0
    # Row 3 of 7 and column 2 of 5 are the middle ones.
    parts[0, 3, 2] = 8.0
    placed = map_on_grid(parts, Grid(4, 4), height=70, width=50)
    assert placed[0].tolist() == [[1, 0, 0, 0], [0, 2, 2, 0], [0, 2, 2, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ((0, 0, 8, 8), [[0.25, 0.25], [0.25, 0.25]]),
        ((0, 0, 4, 4), [[1, 0], [0, 0]]),
        ((2, 0, 6, 1), [[0.5, 0.5], [0, 0]]),
        ((3, 2, 7, 8), [[1 / 12, 3 / 12], [2 / 12, 6 / 12]]),
        # Cut off at the edge: what is left counts in full.
        ((-4, 2, 6, 4), [[4 / 6, 2 / 6], [0, 0]]),
        ((20, -9, 30, -5), [[0, 1], [0, 0]]),  # nothing is left: the nearest place
        ((3, 5, 3, 5), [[0, 0], [1, 0]]),  # a point
        ((8, 8, 8, 8), [[0, 0], [0, 1]]),  # on the last edges
        ((8, 0, 8, 8), [[0, 0.5], [0, 0.5]]),  # a line on the last edge
    ],
)
def test_boxes_are_divided_by_area(
    box: tuple[int, int, int, int], expected: list[list[float]]
) -> None:
    pieces = ((ScoreBox(2.0, *map(float, box)),), ())
    placed = map_on_grid(pieces, Grid(2, 2), height=8, width=8)
    torch.testing.assert_close(placed, torch.tensor([expected, [[0, 0], [0, 0]]]) * 2.0)


def test_like_is_compared_with_like_wherever_it_stands() -> None:
    def letter(kind: str, value: float, left: float) -> ScoreBox:
        return ScoreBox(value, left, 0.0, left + 1.0, 1.0, kind=kind)

    group = (
        (letter("a", 0.5, 0.0), letter("b", 0.5, 1.0), letter("", 0.7, 5.0)),
        (letter("a", 0.0, 6.0), letter("b", 0.5, 7.0)),
        (letter("a", 0.25, 3.0),),
        (letter("a", 9.0, 3.0),),
    )
    # The last image was left out of its group.
    found = like_with_like(group, [True, True, True, False])
    assert [[box.value for box in boxes] for boxes in found] == [
        [0.25, 0.0],
        [-0.25, 0.0],
        [0.0],
        [],
    ]
    assert [[box.left for box in boxes] for boxes in found] == [[0.0, 1.0], [6.0, 7.0], [3.0], []]
    assert [[box.value for box in boxes] for boxes in without_kind(group)] == [[0.7], [], [], []]


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1, 1)), max_size=5)))
def test_each_kind_adds_up_to_zero_and_one_of_its_kind_has_none(
    group: list[list[tuple[str, float]]],
) -> None:
    boxes = tuple(
        tuple(ScoreBox(value, 0.0, 0.0, 1.0, 1.0, kind=kind) for kind, value in found)
        for found in group
    )
    compared = [box for found in like_with_like(boxes, [True] * len(boxes)) for box in found]
    for kind in "abc":
        values = [box.value for box in compared if box.kind == kind]
        assert abs(sum(values)) < 1e-12
        assert len(values) != 1 or values == [0.0]


def test_boxes_are_in_pixels_of_an_image_of_any_shape_and_add_up() -> None:
    right = (20.0, 0.0, 30.0, 5.0)
    pieces = ((ScoreBox(1.0, *right), ScoreBox(-0.5, 0.0, 5.0, 10.0, 10.0), ScoreBox(2.0, *right)),)
    placed = map_on_grid(pieces, Grid(2, 3), height=10, width=30)
    assert placed[0].tolist() == [[0, 0, 3], [-0.5, 0, 0]]


@pytest.mark.parametrize(
    ("parts", "values", "expected"),
    [
        ([[[0.2, 0.4]], [[0.1, 0.1]]], [0.3, 0.1], True),
        ([[[0.2, 0.4]], [[0.1, 0.1]]], [0.6, 0.2], False),
        ([[[0.2, 0.4]], [[0.1, 0.1]]], [0.3, 0.2], False),  # one of them
        ([[[0.3]], [[0.1]]], [0.3, 0.1], False),  # one place: the sum is the mean
        ([[[0.0, 0.0]], [[0.5, -0.5]]], [0.0, 0.0], False),  # scores of 0: the same, too
        ([[[2e-7, 1e-7]], [[0.0, 0.0]]], [3e-7, 0.0], False),  # small scores, such as odds
        ([[[2e-7, 4e-7]], [[1e-7, 1e-7]]], [3e-7, 1e-7], True),
    ],
)
def test_means_in_place_of_sums_are_found(parts, values, expected: bool) -> None:
    assert is_placed_by_mean(torch.tensor(parts), torch.tensor(values)) is expected


def test_which_kinds_have_parts() -> None:
    found = {kind: config.score_map for kind, config in KINDS.items()}
    with_map = {kind: parts for kind, parts in found.items() if parts != "never"}
    always = dict.fromkeys(("lpips", "ssim", "psnr", "ocr", "composition"), "always")
    assert with_map == {**always, "custom": "by function"}
