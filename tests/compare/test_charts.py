from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest
from PIL import Image

from glm_grpo.compare.page import Line, Point, draw_lines, draw_points

LABELS: dict[str, Any] = {"x_label": "step", "y_label": "total", "is_dark": False}
RISING = Line("rising", (0.0, 10.0), (0.0, 1.0))
ORIGIN = Point("untrained", 0.0, 0.0)


def pixels_of(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def places_of(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Rows and columns of the pixels of a colour, the legend at the bottom aside."""
    found = np.argwhere((np.abs(pixels[:480] - colour) < 8).all(axis=-1))
    assert len(found) > 0
    return found


def test_draw_lines_draws_what_rises_as_rising() -> None:
    falling = Line("falling", (0.0, 10.0), (1.0, 0.0))
    pixels = pixels_of(draw_lines([RISING, falling], **LABELS))
    # Blue is the first colour, vermilion the second; rows count downwards.
    for colour, direction in (((0, 114, 178), -1), ((213, 94, 0), 1)):
        places = places_of(pixels, colour)
        left = places[places[:, 1] < np.quantile(places[:, 1], 0.2), 0].mean()
        right = places[places[:, 1] > np.quantile(places[:, 1], 0.8), 0].mean()
        assert np.sign(right - left) == direction


def test_draw_lines_gives_every_line_a_place_in_the_legend() -> None:
    one = pixels_of(draw_lines([RISING], **LABELS))
    three = pixels_of(draw_lines([RISING, RISING, RISING], **LABELS))
    # 0.22 inches of 200 pixels more for each.
    assert three.shape[0] - one.shape[0] == 88
    assert three.shape[1] == one.shape[1] == 880


@pytest.mark.parametrize(("is_dark", "ground"), [(False, (255, 255, 255)), (True, (30, 32, 38))])
def test_drawings_have_the_ground_of_their_page(
    ground: tuple[int, int, int], *, is_dark: bool
) -> None:
    options = LABELS | {"is_dark": is_dark}
    for png in (draw_lines([RISING], **options), draw_points([ORIGIN], ORIGIN, **options)):
        pixels = pixels_of(png)
        assert tuple(pixels[0, 0]) == ground
        # Most of it is ground, and what is written can be told from it.
        assert (pixels == ground).all(axis=-1).mean() > 0.8
        assert np.abs(pixels.sum(axis=-1) - sum(ground)).max() > 500


def test_draw_points_places_points_in_the_colours_of_the_lines() -> None:
    points = [Point("low right", 1.0, 0.0), Point("high left", 0.0, 1.0)]
    pixels = pixels_of(draw_points(points, ORIGIN, **LABELS))
    low_right = places_of(pixels, (0, 114, 178)).mean(axis=0)
    high_left = places_of(pixels, (213, 94, 0)).mean(axis=0)
    assert low_right[0] > high_left[0] + 100
    assert low_right[1] > high_left[1] + 100


def test_draw_points_rings_and_joins_the_marked_ones() -> None:
    places = [(0.5, 1.0), (1.0, 0.5)]
    plain = pixels_of(draw_points([Point("p", *place) for place in places], ORIGIN, **LABELS))
    marked = [Point("p", *place, is_marked=True) for place in places]
    ringed = pixels_of(draw_points(marked, ORIGIN, **LABELS))
    changed = np.argwhere((plain != ringed).any(axis=-1))
    centres = [places_of(plain, colour).mean(axis=0) for colour in ((0, 114, 178), (213, 94, 0))]
    for centre in centres:
        # A ring of radius 6.5 points, at 200 pixels an inch 18.
        distances = np.linalg.norm(changed - centre, axis=1)
        assert ((distances > 15) & (distances < 22)).sum() > 100
    middle = (centres[0] + centres[1]) / 2
    assert np.linalg.norm(changed - middle, axis=1).min() < 15
    single = pixels_of(draw_points([marked[0], Point("p", *places[1])], ORIGIN, **LABELS))
    changed = np.argwhere((plain != single).any(axis=-1))
    assert np.linalg.norm(changed - centres[1], axis=1).min() > 50


def test_drawings_take_labels_as_they_are() -> None:
    labels = ("$a_b", "_hidden", "$\\no{such}$", "שלום 漢 🙂", "two\nlines", "lone \udcff")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for label in labels:
            line = Line(label, (0.0, 1.0), (0.0, 1.0))
            options = LABELS | {"x_label": label, "y_label": label}
            assert pixels_of(draw_lines([line], **options)).shape[1] == 880
            point = Point(label, 0.0, 0.0)
            assert pixels_of(draw_points([point], point, **options)).shape[1] == 880


def test_a_formula_in_a_label_is_not_typeset() -> None:
    plain, formula = (
        pixels_of(draw_lines([Line(label, (0.0, 1.0), (0.0, 1.0))], **LABELS))[-60:]
        for label in ("x", "$x$")
    )
    # Typeset, the dollar signs would be gone, and the slanted x no wider.
    width = [np.argwhere((part < 200).all(axis=-1))[:, 1].max() for part in (plain, formula)]
    assert width[1] > width[0] + 15


def test_drawings_are_the_same_every_time() -> None:
    assert draw_lines([RISING], **LABELS) == draw_lines([RISING], **LABELS)
