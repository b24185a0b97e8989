from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor

from rewards.canaries import (
    STD_FLOOR,
    Band,
    Departure,
    find_departures,
    make_bands,
    measure_images,
)
from rewards.types import Prompt

NAN = float("nan")
SIGN = Prompt("sign", "a sign")


def paint(*greys: int) -> UInt8[Tensor, "G 3 16 16"]:
    """One image of one grey for each value."""
    levels = torch.tensor(greys, dtype=torch.uint8)
    return levels[:, None, None, None].expand(-1, 3, 16, 16).contiguous()


def draw_cells(side: int, size: int = 18) -> UInt8[Tensor, "1 3 H W"]:
    """A checkerboard of square cells."""
    index = torch.arange(size) // side
    is_high = (index[:, None] + index) % 2 == 1
    return torch.where(is_high, 255, 0).to(torch.uint8).expand(1, 3, size, size).contiguous()


def measure(pixels: UInt8[Tensor, "G 3 H W"], name: str) -> float:
    return measure_images([SIGN], pixels[None])[name].item()


def test_edge_density_of_two_halves_is_the_two_columns_at_the_step() -> None:
    # Of the 14 inner columns those at both sides of the step have a gradient: 2 of 14.
    image = paint(0)
    assert measure(image, "edge_density") == 0.0
    image[..., 8:] = 255
    assert measure(image, "edge_density") == 2 / 14
    assert measure(image.transpose(2, 3).contiguous(), "edge_density") == 2 / 14


def test_edge_density_of_a_checkerboard_counts_all_but_the_middles_of_cells() -> None:
    # Cells of 3 x 3: only their middles are surrounded by their own colour. Of 16 x 16 inner
    # pixels those in row and column 1, 4, ..., 16 of the image are middles: 6 x 6.
    assert measure(draw_cells(3), "edge_density") == 1 - 36 / 256


def test_edge_density_needs_a_step_of_a_fifth_of_the_range() -> None:
    # The gradient of a step is half of it: 50 / 255 / 2 = 0.098, 52 / 255 / 2 = 0.102.
    image = paint(100)
    image[..., 8:] = 150
    assert measure(image, "edge_density") == 0.0
    image[..., 8:] = 152
    assert measure(image, "edge_density") == 2 / 14


def test_edge_density_follows_luma() -> None:
    # Luma of blue is 0.114: a step from black has a gradient of 0.057. Of green 0.587.
    blue, green = paint(0), paint(0)
    blue[:, 2, :, 8:] = 255
    green[:, 1, :, 8:] = 255
    assert measure(blue, "edge_density") == 0.0
    assert measure(green, "edge_density") == 2 / 14


def test_dark_and_bright_fractions_have_thresholds_of_luma() -> None:
    # 0.2 of 255 is 51, 0.8 is 204; the mean is over the images.
    greys = paint(50, 52, 203, 205)
    # Blue is dark and yellow is bright: luma 0.114 and 0.886.
    coloured = paint(0, 255)
    coloured[0, 2] = 255
    coloured[1, 2] = 0
    for pixels, expected in ((greys, 0.25), (coloured, 0.5)):
        assert measure(pixels, "dark_fraction") == measure(pixels, "bright_fraction") == expected


def test_colour_entropy_of_two_colours_is_one_bit() -> None:
    image = paint(0)
    image[:, 0, :, 8:] = 255
    assert measure(image, "colour_entropy") == pytest.approx(1.0)
    # 1/4 and 3/4: 0.25 * 2 + 0.75 * log2(4 / 3) = 0.8113.
    image[:, 0, :, 4:8] = 255
    assert measure(image, "colour_entropy") == pytest.approx(0.811278, abs=1e-6)
    # Two images of one colour each hold no information, whatever they are together.
    assert measure(paint(0, 255), "colour_entropy") == 0.0


def test_colour_entropy_tells_all_levels_of_all_channels_apart() -> None:
    # 64 pixels, each of another colour of the 4 x 4 x 4: log2(64) bits. 63 is of the lowest level.
    levels = torch.tensor([63, 64, 191, 192])
    colours = torch.cartesian_prod(levels, levels, levels).to(torch.uint8)
    assert measure(colours.T.reshape(1, 3, 8, 8), "colour_entropy") == pytest.approx(6.0)


def test_pixel_diversity_is_the_mean_difference_of_pairs() -> None:
    # Black, white, white: of three pairs two differ, by 1.
    assert measure(paint(0, 255, 255), "pixel_diversity") == pytest.approx(2 / 3)
    # A difference of 1 in half of the pixels: sqrt(1 / 2).
    halves = paint(0, 0)
    halves[1, :, :8] = 255
    assert measure(halves, "pixel_diversity") == pytest.approx(math.sqrt(0.5))
    assert measure(draw_cells(3).expand(4, -1, -1, -1), "pixel_diversity") == 0.0
    assert math.isnan(measure(draw_cells(3), "pixel_diversity"))


def test_pixel_diversity_does_not_count_what_averages_out() -> None:
    # 64 x 64 pixels are scaled to 32 x 32: every 2 x 2 block of alternating pixels is grey.
    images = torch.cat([draw_cells(1, size=64), 255 - draw_cells(1, size=64)])
    assert measure(images, "pixel_diversity") == pytest.approx(0.0, abs=1e-6)


def test_source_copies_are_images_that_differ_by_no_more_than_a_decoder_changes() -> None:
    prompts = [Prompt("edit", "turn it", sources=(paint(100)[0],)), SIGN]
    # A step of 6 in 255 is 0.0235, one of 5 is 0.0196.
    values = measure_images(prompts, torch.stack([paint(100, 105, 106, 200)] * 2))
    assert values["source_copies"][0] == 0.5
    assert values["source_copies"][1].isnan()


def test_band_has_mean_and_sample_std_of_prompts_with_a_value() -> None:
    # Deviations -2, 0, 2: sample variance 8 / 2. NaN is left out.
    values = {"seen": torch.tensor([1.0, NAN, 3.0, 5.0]), "rare": torch.tensor([1.0, NAN])}
    assert make_bands(values) == {"seen": Band(mean=3.0, std=2.0, prompts=3)}


def test_band_has_both_standard_errors() -> None:
    # 3 * 2 * sqrt(1 / 4 + 1 / 16) = 6 * 0.559017.
    assert Band(0.0, 2.0, 16).limits(4, 3.0) == pytest.approx((-3.354102, 3.354102))


def test_departures_are_means_outside_the_band_at_either_side() -> None:
    # Half width 4 * 1 * sqrt(1 / 2 + 1 / 2) = 4 about 10.
    bands = {name: Band(10.0, 1.0, 2) for name in ("low", "inside", "high", "edge")}
    values = {
        "low": torch.tensor([5.0, 6.0]),
        "inside": torch.tensor([9.0, 18.5]),
        "high": torch.tensor([14.0, 14.5]),
        "edge": torch.tensor([6.0, 6.0]),
    }
    low, high = find_departures(bands, values, 4.0)
    assert (low, high) == (Departure("low", 5.5, 6.0, 14.0), Departure("high", 14.25, 6.0, 14.0))
    assert "low 5.5 is below 6..14" in low.describe()
    assert "high 14.25 is above 6..14" in high.describe()
    assert find_departures(bands, values, 5.0) == ()


def test_a_band_moves_to_the_mean_of_other_prompts_with_the_spread_of_both() -> None:
    band = make_bands({"edge_density": torch.tensor([1.0, 2.0, 3.0])})["edge_density"]
    # Squares around the own means: 1 + 0 + 1, and 1 + 1; degrees of freedom: 2 + 1.
    moved = band.moved_to(torch.tensor([10.0, NAN, 12.0]))
    assert (moved.mean, moved.prompts) == (11.0, 2)
    assert moved.std == pytest.approx(math.sqrt(4 / 3))
    assert moved.collapse_below == pytest.approx(1.1)
    assert band.moved_to(torch.tensor([NAN])) == band


def test_departures_count_only_prompts_with_a_value() -> None:
    # One prompt left: half width 4 * sqrt(1 + 1 / 2) = 4.9; with two it would be 4.
    bands = {"watched": Band(10.0, 1.0, 2)}
    assert find_departures(bands, {"watched": torch.tensor([14.5, NAN])}, 4.0) == ()
    assert len(find_departures(bands, {"watched": torch.tensor([14.5, 14.5])}, 4.0)) == 1
    assert find_departures(bands, {"watched": torch.tensor([NAN, NAN])}, 4.0) == ()


def test_departures_of_a_constant_canary_need_more_than_rounding() -> None:
    # Half width 4 * 0.001 * sqrt(1 / 8 + 1 / 8) = 0.002.
    bands = make_bands({"bright_fraction": torch.full((8,), 0.1)})
    assert STD_FLOOR == 1e-3
    near = {"bright_fraction": torch.full((8,), 0.1019, dtype=torch.float64)}
    far = {"bright_fraction": torch.full((8,), 0.1021, dtype=torch.float64)}
    assert find_departures(bands, near, 4.0) == ()
    assert [departure.name for departure in find_departures(bands, far, 4.0)] == ["bright_fraction"]


def test_departures_show_a_variety_that_vanishes_where_prompts_differ_much() -> None:
    # Mean 0.25, sample std 0.289: six standard errors of four prompts reach down to -0.97.
    names = ("pixel_diversity", "bright_fraction")
    bands = make_bands(dict.fromkeys(names, torch.tensor([0.0, 0.5, 0.0, 0.5])))
    alike = dict.fromkeys(names, torch.full((4,), 0.024))
    (departure,) = find_departures(bands, alike, margin=6.0)
    assert departure.name == "pixel_diversity"
    assert departure.low == pytest.approx(0.025)
    assert find_departures(bands, dict.fromkeys(names, torch.full((4,), 0.026)), 6.0) == ()
