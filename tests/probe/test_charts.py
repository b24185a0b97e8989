from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.probe.page import Bars, Range, draw_bars, draw_matrix, draw_ranges

NAN = float("nan")
BLUE, VERMILION, GREEN, GREY = (0, 114, 178), (213, 94, 0), (0, 158, 115), (185, 187, 196)
WHITE, INK = (255, 255, 255), (28, 29, 33)


def pixels_of(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def find(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Rows and columns of the pixels of a colour, the legend at the bottom aside."""
    return np.argwhere((np.abs(pixels[:-60] - colour) < 8).all(axis=-1))


def width_of(places: np.ndarray) -> int:
    return int(np.ptp(places[:, 1])) + 1


def bars(*groups: tuple[float, ...], mark: float | None = None, is_dark: bool = False) -> bytes:
    names = [f"term_{index}" for index in range(len(groups[0]))]
    labelled = [Bars(f"group {index}", values) for index, values in enumerate(groups)]
    return draw_bars(names, labelled, mark=mark, is_dark=is_dark)


def ranges(*scores: Range, is_dark: bool = False) -> bytes:
    return draw_ranges(scores, best_label="best of 8", is_dark=is_dark)


def matrix(*rows: list[float], is_dark: bool = False) -> bytes:
    names = [f"term_{index}" for index in range(len(rows))]
    return draw_matrix(names, torch.tensor(rows, dtype=torch.float64), is_dark=is_dark)


def test_draw_bars_draws_lengths_in_proportion() -> None:
    pixels = pixels_of(bars((0.25, 0.75), (0.5, 1.0)))
    blue, grey = find(pixels, BLUE), find(pixels, GREY)
    middle = (grey[:, 0].min() + blue[:, 0].max()) / 2
    # Of one thickness, so that areas are in the proportion of lengths.
    areas = np.array(
        [
            is_in_row.sum()
            for places in (grey, blue)
            for is_in_row in (places[:, 0] < middle, places[:, 0] > middle)
        ]
    )
    np.testing.assert_allclose(areas / areas[3], [0.25, 0.75, 0.5, 1.0], atol=0.03)


def test_draw_bars_draws_a_negative_share_to_the_left() -> None:
    pixels = pixels_of(bars((-0.5, 1.0)))
    blue = find(pixels, BLUE)
    middle = (blue[:, 0].min() + blue[:, 0].max()) / 2
    upper, lower = blue[blue[:, 0] < middle], blue[blue[:, 0] > middle]
    # Both start at zero, but for the line drawn there.
    assert abs(upper[:, 1].max() - lower[:, 1].min()) < 6
    assert width_of(lower) == pytest.approx(2 * width_of(upper), abs=6)


def test_draw_bars_draws_no_bar_and_a_dash_for_what_has_no_value() -> None:
    missing, zero = pixels_of(bars((NAN, 1.0))), pixels_of(bars((0.0, 1.0)))
    assert len(find(missing, BLUE)) == len(find(zero, BLUE))
    # A dash has less ink than 0.00, and is there.
    ink = [len(find(pixels, INK)) for pixels in (missing, zero, pixels_of(bars((1.0,))))]
    assert ink[0] < ink[1]
    assert (missing != zero).any()


def test_draw_bars_marks_a_value_where_asked() -> None:
    plain, marked = pixels_of(bars((0.25, 1.0))), pixels_of(bars((0.25, 1.0), mark=0.5))
    assert len(find(plain, VERMILION)) == 0
    line, blue = find(marked, VERMILION), find(marked, BLUE)
    assert width_of(line) < 8
    half = (blue[:, 1].min() + blue[:, 1].max()) / 2
    assert line[:, 1].mean() == pytest.approx(half, abs=6)


def test_draw_ranges_places_mean_best_and_reconstruction_on_one_scale() -> None:
    # Mean 0.2, best 0.4, own tokens 1.0: the best lies a quarter of the way.
    pixels = pixels_of(ranges(Range("lpips", 0.2, 0.4, 1.0)))
    blue, green = find(pixels, BLUE), find(pixels, GREEN)
    radius = np.ptp(blue[:, 0]) / 2
    # The line begins at the mean, whose upright mark hides a few pixels of it.
    mean, best = blue[:, 1].min(), blue[:, 1].max() - radius
    own = (green[:, 1].min() + green[:, 1].max()) / 2
    assert (best - mean) / (own - mean) == pytest.approx(0.25, abs=0.02)


def test_draw_ranges_gives_each_term_a_scale_of_its_own() -> None:
    small, large = Range("hps", 0.27, 0.28, 0.29), Range("psnr", 20.0, 25.0, 30.0)
    pixels = pixels_of(ranges(small, large))
    green = find(pixels, GREEN)
    middle = (green[:, 0].min() + green[:, 0].max()) / 2
    upper, lower = green[green[:, 0] < middle], green[green[:, 0] > middle]
    assert lower[:, 0].mean() - upper[:, 0].mean() > 80
    # On one scale the first would be at the far left.
    assert abs(upper[:, 1].mean() - lower[:, 1].mean()) < 4


def test_draw_ranges_leaves_out_what_has_no_value() -> None:
    without_targets = pixels_of(ranges(Range("lpips", 0.2, 0.4, NAN)))
    assert len(find(without_targets, GREEN)) == 0
    assert len(find(without_targets, BLUE)) > 0
    nothing = pixels_of(ranges(Range("lpips", NAN, NAN, NAN)))
    assert len(find(nothing, GREEN)) == len(find(nothing, BLUE)) == 0


def test_draw_matrix_colours_cells_by_sign_and_size() -> None:
    pixels = pixels_of(matrix([1.0, -1.0, NAN], [-1.0, 1.0, 0.5], [NAN, 0.5, 1.0]))
    blue, vermilion = find(pixels, BLUE), find(pixels, VERMILION)
    # Half way between white and blue.
    half = find(pixels, (128, 185, 217))
    assert len(blue) == pytest.approx(1.5 * len(vermilion), rel=0.05)
    assert len(half) == pytest.approx(len(vermilion), rel=0.05)
    # The diagonal falls. The first and second term are a cell above and left of second and third.
    assert np.corrcoef(blue.T)[0, 1] > 0.8
    cell = np.ptp(blue, axis=0) / 3
    assert half.mean(axis=0) - vermilion.mean(axis=0) == pytest.approx(cell, rel=0.05)


def test_draw_matrix_writes_on_each_cell_in_what_can_be_read() -> None:
    # On blue in white; on a pale cell and where there is no value in dark.
    white, dark = (pixels_of(matrix([value])) for value in (1.0, 0.1))
    cells = [pixels[60:200, 300:700].reshape(-1, 3) for pixels in (white, dark)]
    assert cells[0].min(axis=-1).max() == 255
    assert cells[1].sum(axis=-1).min() < 150
    dash = [pixels_of(matrix([NAN], is_dark=is_dark)) for is_dark in (False, True)]
    sums = [pixels[60:200, 300:700].sum(axis=-1) for pixels in dash]
    assert sums[0].min() < 150
    assert sums[1].max() > 650


@pytest.mark.parametrize(("is_dark", "ground"), [(False, WHITE), (True, (30, 32, 38))])
def test_drawings_have_the_ground_of_their_page(
    ground: tuple[int, int, int], *, is_dark: bool
) -> None:
    drawings = (
        bars((0.5,), (0.5,), is_dark=is_dark),
        ranges(Range("a", 0.0, 0.5, 1.0), is_dark=is_dark),
        matrix([1.0, 0.0], [0.0, 1.0], is_dark=is_dark),
    )
    for png in drawings:
        pixels = pixels_of(png)
        assert pixels.shape[1] == 880
        assert tuple(pixels[0, 0]) == tuple(pixels[-1, -1]) == ground
        assert np.abs(pixels.sum(axis=-1) - sum(ground)).max() > 500


def test_drawings_grow_with_the_number_of_terms() -> None:
    heights = [pixels_of(bars((0.5,) * terms, (0.5,) * terms)).shape[0] for terms in (1, 3)]
    # 0.28 inches of 200 pixels for each of two bars and the half one between terms.
    assert heights[1] - heights[0] == 280
    one, two = Range("a", 0.0, 0.5, 1.0), Range("b", 0.0, 0.5, 1.0)
    heights = [pixels_of(ranges(*rows)).shape[0] for rows in ([one], [one, two])]
    assert heights[1] - heights[0] == 124


def test_drawings_take_names_as_they_are() -> None:
    names = ("$a_b$", "\\frac{1}{2} $x$", "שלום 漢 🙂", "two\nlines", "lone \udcff", "w" * 5000, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in names:
            values = torch.eye(2, dtype=torch.float64)
            drawings = (
                draw_bars([name], [Bars("share", (0.5,))], mark=None, is_dark=False),
                ranges(Range(name, 0.0, 0.5, 1.0)),
                draw_matrix([name, name], values, is_dark=False),
            )
            assert {pixels_of(png).shape[1] for png in drawings} == {880}


def test_a_formula_in_a_name_is_not_typeset() -> None:
    widths = []
    for name in ("x", "$x$"):
        png = draw_bars([name], [Bars("share", (0.5,))], mark=None, is_dark=False)
        # Names end at the axis: the wider one pushes it to the right.
        widths.append(find(pixels_of(png), BLUE)[:, 1].min())
    # Typeset, the dollar signs would be gone.
    assert widths[1] > widths[0] + 15


def test_drawings_are_the_same_every_time() -> None:
    assert bars((0.5,), (0.25,)) == bars((0.5,), (0.25,))
    assert ranges(Range("a", 0.0, 0.5, 1.0)) == ranges(Range("a", 0.0, 0.5, 1.0))
    assert matrix([1.0]) == matrix([1.0])
