"""Measure images beside the reward (canaries), and judge the measures by the base model.

A policy that games its reward changes its images in unwanted ways: they become flat, bright,
noisy, or all the same. This does not detect changes that preserve all of these measures, and
patterns that alternate from pixel to pixel, to which the Sobel operator is blind.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float32, Float64, UInt8
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from rewards.types import Prompt

IMAGE_MEASURES = (
    "edge_density",
    "dark_fraction",
    "bright_fraction",
    "colour_entropy",
    "pixel_diversity",
)
SOURCE_COPIES = "source_copies"
"""Fraction of an edit's images that are copies of its source, the trivial optimum of `against:
source`. Lower values are harmless, so its band begins at 0."""
TOKEN_ENTROPY = "token_entropy"
"""Minus the mean log-probability of the sampled tokens, measured by the trainer."""

VARIETIES = frozenset({"edge_density", "colour_entropy", "pixel_diversity", TOKEN_ENTROPY})
"""Measures for which 0 means that there is nothing to see, or to choose from."""
COLLAPSE_FRACTION = 0.1
"""A measure of variety has collapsed if it falls below this fraction of the base mean."""

EDGE_GRADIENT = 0.1
"""Luma gradient per pixel from which a pixel lies on an edge; a step of 0.2 between areas has
it."""
DARK_LUMA, BRIGHT_LUMA = 0.2, 0.8
"""Luma, 0..1, below which a pixel is dark, and above which it is bright."""
COLOUR_LEVELS = 4
"""Levels per colour channel in the histogram of colours; a divisor of 256."""
DIVERSITY_SIDE = 32
"""Side in pixels to which larger images are scaled down before they are compared with each other,
so that noise does not count as diversity."""
COPY_DISTANCE = 0.02
"""Largest root mean square difference, of values in 0..1 scaled down to `DIVERSITY_SIDE`, at which
an image is a copy of its source; encoding and decoding alone change less."""
STD_FLOOR = 1e-3
"""Smallest std of a band, in units of the canary, so that a canary that was constant on the
base model, such as a fraction of 0, does not leave its band because of rounding or a
thousandth of the pixels."""

# For red, green and blue. Source: ITU-R BT.601-7, section 2.5.1.
_LUMA_WEIGHTS = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Band:
    """Distribution of a canary on the base model.

    Attributes:
        mean: Mean over prompts.
        std: Sample std over prompts (divided by n - 1).
        collapse_below: Lowest allowed mean of a measure of variety, whatever the margin; None for
            others.
        is_judged_below: Whether low values are judged; if not, the band begins at 0.
        is_of_evaluations: Whether it is a term's score that is judged only in evaluations; higher
            is better, so the band has no upper end.
    """

    mean: float
    std: float
    prompts: int
    collapse_below: float | None = None
    is_judged_below: bool = True
    is_of_evaluations: bool = False

    def limits(self, prompts: int, margin: float) -> tuple[float, float]:
        """Ends of the band for a mean over this many other prompts.

            mean -+ margin * max(std, STD_FLOOR) * sqrt(1 / prompts + 1 / self.prompts)

        which is `margin` standard errors of the difference of two means: both the mean of a step
        and, with few measured prompts, that of the band are uncertain. The uncertainty of the std
        is not included: with fewer than about ten prompts, a mean leaves the band by chance more
        often than its normal probability. If prompts differ a lot from each other, the margin alone
        would reach below 0, and miss a vanishing variety: hence `collapse_below`.
        """
        half_width = margin * max(self.std, STD_FLOOR) * math.sqrt(1 / prompts + 1 / self.prompts)
        low = self.mean - half_width if self.is_judged_below else 0.0
        if self.collapse_below is not None:
            low = max(low, self.collapse_below)
        return low, math.inf if self.is_of_evaluations else self.mean + half_width

    def moved_to(self, values: Float[Tensor, " P"]) -> Band:
        """Band around the mean of other prompts by the same model; NaN is left out.

        Their spread counts together with that of this band's prompts, each set around its own mean,
        because a few prompts give the mean without bias but hardly a std.
        """
        present = _present(values)
        count = len(present)
        if count == 0:
            return self
        mean = present.mean().item()
        squares = (self.prompts - 1) * self.std**2 + (present - mean).square().sum().item()
        std = math.sqrt(squares / (self.prompts + count - 2))
        collapse_below = None if self.collapse_below is None else COLLAPSE_FRACTION * mean
        return replace(self, mean=mean, std=std, prompts=count, collapse_below=collapse_below)


@dataclass(frozen=True)
class Departure:
    """A canary whose mean over the prompts of a step is outside `low`..`high`, its band."""

    name: str
    mean: float
    low: float
    high: float

    def describe(self) -> str:
        """Format one line for the log."""
        side = "above" if self.mean > self.high else "below"
        return (
            f"{self.name} {self.mean:.4g} is {side} {self.low:.4g}..{self.high:.4g}, the band of "
            "the base model"
        )


def make_bands(
    values: Mapping[str, Float[Tensor, " P"]], *, evaluated: Collection[str] = ()
) -> dict[str, Band]:
    """Make the band of each canary from values of the base model.

    Args:
        values: One value per prompt, by canary; NaN for prompts to which it does not apply. A
            canary with fewer than two values gets no band.
        evaluated: Canaries that are terms scored only in evaluations.
    """
    bands = {}
    for name, column in values.items():
        present = _present(column)
        if len(present) < 2:
            continue
        mean = present.mean().item()
        bands[name] = Band(
            mean,
            present.std().item(),
            len(present),
            collapse_below=COLLAPSE_FRACTION * mean if name in VARIETIES else None,
            is_judged_below=name != SOURCE_COPIES,
            is_of_evaluations=name in evaluated,
        )
    return bands


def find_departures(
    bands: Mapping[str, Band], values: Mapping[str, Float[Tensor, " P"]], margin: float
) -> tuple[Departure, ...]:
    """Find the canaries whose mean over the prompts of a step is outside their band.

    Args:
        values: One value per prompt of the step, for each band; NaN for prompts to which the canary
            does not apply. A canary that applies to no prompt is not judged.
        margin: See `Band.limits`; > 0.
    """
    departures = []
    for name, band in bands.items():
        present = _present(values[name])
        if len(present) > 0:
            mean = present.mean().item()
            low, high = band.limits(len(present), margin)
            if not low <= mean <= high:
                departures.append(Departure(name, mean, low, high))
    return tuple(departures)


def measure_images(
    prompts: Sequence[Prompt], pixels: UInt8[Tensor, "P G 3 H W"]
) -> dict[str, Float64[Tensor, " P"]]:
    """Measure each prompt's group of images, on their device; means over the group.

    - `edge_density`: fraction of pixels whose Sobel gradient of luma is at least `EDGE_GRADIENT`;
      border pixels have no gradient and do not count.
    - `dark_fraction`, `bright_fraction`: fractions of pixels with a luma below `DARK_LUMA` or above
      `BRIGHT_LUMA`.
    - `colour_entropy`: entropy of an image's histogram of colours, in bits; 0 for one colour, at
      most 6 for 4 x 4 x 4 levels.
    - `pixel_diversity`: mean over pairs of images of the root mean square difference of their
      values in 0..1, scaled down to `DIVERSITY_SIDE`; 0 for equal images, NaN for a single one.
    - `source_copies`, if any prompt has a source: fraction of images that are copies of the first
      one, see `COPY_DISTANCE`; NaN for prompts without a source.

    Returns:
        Values on the CPU.
    """
    groups = [_measure_group(group) for group in pixels]
    if any(prompt.sources for prompt in prompts):
        for prompt, images, measures in zip(prompts, pixels, groups, strict=True):
            measures[SOURCE_COPIES] = _copied_fraction(prompt, images)
    return {
        name: torch.tensor([group[name] for group in groups], dtype=torch.float64)
        for name in groups[0]
    }


def _measure_group(pixels: UInt8[Tensor, "G 3 H W"]) -> dict[str, float]:
    values = pixels.float() / 255
    luma = torch.einsum("gchw,c->ghw", values, values.new_tensor(_LUMA_WEIGHTS))
    small = _scale_down(values)
    distances = torch.pdist(small) / math.sqrt(small.shape[1])
    return {
        "edge_density": _fraction(_gradient(luma) >= EDGE_GRADIENT),
        "dark_fraction": _fraction(luma < DARK_LUMA),
        "bright_fraction": _fraction(luma > BRIGHT_LUMA),
        "colour_entropy": _colour_entropy(pixels),
        # NaN for a single image, which has no pairs.
        "pixel_diversity": distances.mean().item(),
    }


def _copied_fraction(prompt: Prompt, pixels: UInt8[Tensor, "G 3 H W"]) -> float:
    if not prompt.sources:
        return math.nan
    source = prompt.sources[0][None].to(pixels.device)
    difference = _scale_down(pixels.float() / 255) - _scale_down(source.float() / 255)
    return _fraction(difference.square().mean(dim=1).sqrt() <= COPY_DISTANCE)


def _present(values: Float[Tensor, " P"]) -> Float64[Tensor, " present"]:
    return values[~values.isnan()].double()


def _fraction(is_counted: Tensor) -> float:
    return is_counted.double().mean().item()


def _gradient(luma: Float32[Tensor, "G H W"]) -> Float32[Tensor, "G H-2 W-2"]:
    """Magnitude of the Sobel gradient in luma per pixel, without the border."""
    # With slices, because convolutions round differently on other devices.
    columns = luma[:, :-2] + 2 * luma[:, 1:-1] + luma[:, 2:]
    rows = luma[:, :, :-2] + 2 * luma[:, :, 1:-1] + luma[:, :, 2:]
    across = columns[:, :, 2:] - columns[:, :, :-2]
    down = rows[:, 2:] - rows[:, :-2]
    # Two pixels apart, with weights that add up to 4.
    return torch.hypot(across, down) / 8


def _colour_entropy(pixels: UInt8[Tensor, "G 3 H W"]) -> float:
    levels = pixels.flatten(2).long() // (256 // COLOUR_LEVELS)
    colours = (levels[:, 0] * COLOUR_LEVELS + levels[:, 1]) * COLOUR_LEVELS + levels[:, 2]
    counts = torch.stack([each.bincount(minlength=COLOUR_LEVELS**3) for each in colours])
    nats = torch.special.entr(counts.double() / colours.shape[1]).sum(dim=1)
    return nats.mean().item() / math.log(2)


def _scale_down(values: Float32[Tensor, "G 3 H W"]) -> Float32[Tensor, "G pixels"]:
    height, width = (min(side, DIVERSITY_SIDE) for side in values.shape[2:])
    return adaptive_avg_pool2d(values, (height, width)).flatten(1)
