"""Compute canaries, measures that are not trained on, and the bands of the untrained model.

A policy that games its reward changes its pictures in unwanted ways: they become flat, bright,
noisy, or all the same. This does not detect changes that preserve all of these measures, and
patterns that alternate from pixel to pixel, to which the Sobel operator is blind.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

import torch
from jaxtyping import Float, Float32, Float64, UInt8
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from rewards.types import Prompt

EDGE_GRADIENT = 0.1
"""Luma gradient per pixel from which a pixel lies on an edge; a step of 0.2 between areas has
it."""
DARK_LUMA = 0.2
"""Luma, 0..1, below which a pixel is dark."""
BRIGHT_LUMA = 0.8
"""Luma, 0..1, above which a pixel is bright."""
COLOUR_LEVELS = 4
"""Levels per colour channel in the histogram of colours; a divisor of 256."""
DIVERSITY_SIDE = 32
"""Side in pixels to which larger pictures are scaled down before they are compared with each other,
so that noise does not count as diversity."""
COPY_DISTANCE = 0.02
"""Largest root mean square difference, of values in 0..1 scaled down to `DIVERSITY_SIDE`, at which
a picture is a copy of its source; encoding and decoding alone change less."""
STD_FLOOR = 1e-3
"""Smallest std of a band, in units of the canary, so that a canary that was constant on the
untrained model, such as a fraction of 0, does not leave its band because of rounding or a
thousandth of the pixels."""

COLLAPSE_FRACTION = 0.1
"""A measure of variety has collapsed if it falls below this fraction of the untrained mean."""

# For red, green and blue. Source: ITU-R BT.601-7, section 2.5.1.
_LUMA_WEIGHTS = (0.299, 0.587, 0.114)

VARIETIES = frozenset({"edge_density", "colour_entropy", "pixel_diversity"})
"""Measures of pictures for which 0 means that there is nothing to see, or to choose from."""

SOURCE_COPIES = "source_copies"
"""Fraction of an edit's pictures that are copies of its source, the trivial optimum of `against:
source`."""

JUDGED_ABOVE_ALONE = frozenset({SOURCE_COPIES})
"""Fractions for which lower values are harmless, so their band begins at 0."""


@dataclass(frozen=True)
class PictureMeasures:
    """Measures of one prompt's group of pictures; means over the pictures, except for the last.

    Attributes:
        edge_density: Fraction of pixels whose Sobel gradient of luma is at least `EDGE_GRADIENT`;
            0..1. Border pixels have no gradient and do not count.
        dark_fraction: Fraction of pixels with a luma below `DARK_LUMA`; 0..1.
        bright_fraction: Fraction of pixels with a luma above `BRIGHT_LUMA`; 0..1.
        colour_entropy: Entropy of a picture's histogram of colours, in bits; 0 for one colour, at
            most 6 for 4 x 4 x 4 levels.
        pixel_diversity: Mean over pairs of pictures of the root mean square difference of their
            values in 0..1, scaled down to `DIVERSITY_SIDE`; 0 for equal pictures, at most 1, NaN
            for a single picture.
    """

    edge_density: float
    dark_fraction: float
    bright_fraction: float
    colour_entropy: float
    pixel_diversity: float


@dataclass(frozen=True)
class Band:
    """Distribution of a canary on the untrained model.

    Attributes:
        mean: Mean over prompts.
        std: Sample std over prompts (divided by n - 1).
        prompts: Number of prompts in the mean.
        collapse_below: Lowest allowed mean of a measure of variety, whatever the margin; None for
            others.
        is_judged_below: Whether low values are judged; if not, the band begins at 0.
        is_of_evaluations: Whether it is a term's score that is judged only in evaluations, over
            their prompts; higher is better, so the band has no upper end.
    """

    mean: float
    std: float
    prompts: int
    collapse_below: float | None = None
    is_judged_below: bool = True
    is_of_evaluations: bool = False

    def limits(self, prompts: int, margin: float) -> tuple[float, float]:
        """Ends of the band for a mean over this many prompts; see `half_width`.

        If prompts differ a lot from each other, the margin alone would reach below 0, and miss a
        vanishing variety.
        """
        half_width = self.half_width(prompts, margin)
        low = self.mean - half_width if self.is_judged_below else 0.0
        if self.collapse_below is not None:
            low = max(low, self.collapse_below)
        return low, math.inf if self.is_of_evaluations else self.mean + half_width

    def half_width(self, prompts: int, margin: float) -> float:
        """Largest allowed distance of the mean of other prompts from that of the band.

            margin * max(std, STD_FLOOR) * sqrt(1 / prompts + 1 / self.prompts)

        which is `margin` standard errors of the difference of two means: both the mean of a step
        and, with few measured prompts, that of the band are uncertain. The uncertainty of the std
        is not included: with fewer than about ten prompts, a mean leaves the band by chance more
        often than its normal probability.

        Args:
            prompts: Number of prompts in the other mean, >= 1.
            margin: Margin in standard errors, > 0.
        """
        return margin * max(self.std, STD_FLOOR) * math.sqrt(1 / prompts + 1 / self.prompts)

    def moved_to(self, values: Float[Tensor, " P"]) -> Band:
        """Band around the mean of other prompts by the same model.

        Their spread counts together with that of this band's prompts, each set around its own mean,
        because a few prompts give the mean without bias but hardly a std.

        Args:
            values: One value per prompt; NaN for prompts to which the canary does not apply.
        """
        present = values[~values.isnan()].double()
        count = len(present)
        if count == 0:
            return self
        mean = present.mean().item()
        squares = (self.prompts - 1) * self.std**2 + (present - mean).square().sum().item()
        is_variety = self.collapse_below is not None
        return replace(
            self,
            mean=mean,
            std=math.sqrt(squares / (self.prompts + count - 2)),
            prompts=count,
            collapse_below=COLLAPSE_FRACTION * mean if is_variety else None,
        )


@dataclass(frozen=True)
class Departure:
    """A canary outside its band.

    Attributes:
        mean: Mean over the prompts of the step.
        low: Lower end of the band for a mean of that many prompts.
        high: Upper end of the band.
    """

    name: str
    mean: float
    low: float
    high: float

    def describe(self) -> str:
        """Format one line for the log."""
        side = "above" if self.mean > self.high else "below"
        return (
            f"{self.name} {self.mean:.4g} is {side} {self.low:.4g}..{self.high:.4g}, the band of "
            "the untrained model"
        )


def measure(pixels: UInt8[Tensor, "G 3 H W"]) -> PictureMeasures:
    """Measure one group of pictures, on their device.

    Args:
        pixels: RGB, 0..255, at least one picture of at least 3 x 3 pixels.

    Raises:
        ValueError: There are no pictures, or they are too small.
    """
    count, _, height, width = pixels.shape
    if count < 1 or min(height, width) < 3:
        raise ValueError(
            f"{count} images of {width} x {height} pixels: a group needs at least one, and a "
            "gradient at least 3 x 3 pixels; check rollout.height and rollout.width"
        )
    values = pixels.float() / 255
    luma = torch.einsum("gchw,c->ghw", values, values.new_tensor(_LUMA_WEIGHTS))
    return PictureMeasures(
        edge_density=_fraction(_gradient(luma) >= EDGE_GRADIENT),
        dark_fraction=_fraction(luma < DARK_LUMA),
        bright_fraction=_fraction(luma > BRIGHT_LUMA),
        colour_entropy=_colour_entropy(pixels),
        pixel_diversity=_diversity(values),
    )


def measure_groups(pixels: UInt8[Tensor, "P G 3 H W"]) -> dict[str, Float64[Tensor, " P"]]:
    """Measure the groups of P prompts one by one.

    Returns:
        Values per prompt on the CPU, by field of `PictureMeasures`, as expected by `make_bands` and
        `find_departures`.

    Raises:
        ValueError: As for `measure`.
    """
    groups = [asdict(measure(group)) for group in pixels]
    return {
        field.name: torch.tensor([group[field.name] for group in groups], dtype=torch.float64)
        for field in fields(PictureMeasures)
    }


def source_copies(
    prompts: Sequence[Prompt], pixels: UInt8[Tensor, "P G 3 H W"]
) -> Float64[Tensor, " P"]:
    """Fraction of each prompt's pictures that are copies of its first source, see `COPY_DISTANCE`.

    Returns:
        Fractions on the CPU; NaN for prompts without a source.
    """
    fractions = torch.full((len(prompts),), torch.nan, dtype=torch.float64)
    for row, prompt in enumerate(prompts):
        if prompt.sources:
            source = prompt.sources[0].to(pixels.device)
            difference = _small(pixels[row].float() / 255) - _small(source[None].float() / 255)
            fractions[row] = _fraction(difference.square().mean(dim=1).sqrt() <= COPY_DISTANCE)
    return fractions


def make_bands(
    per_prompt_values: Mapping[str, Float[Tensor, " P"]], *, varieties: Collection[str] = VARIETIES
) -> dict[str, Band]:
    """Make the band of each canary from values of the untrained model.

    Args:
        per_prompt_values: One value per prompt, by canary; NaN for prompts to which it does not
            apply, which are left out.
        varieties: Canaries for which 0 means that nothing remains; see `COLLAPSE_FRACTION`.

    Raises:
        ValueError: A value is infinite, or a canary has fewer than two values.
    """
    bands = {}
    for name, values in per_prompt_values.items():
        present = _present(name, values)
        if len(present) < 2:
            raise ValueError(
                f"canary {name}: {len(present)} of {len(values)} prompts of the untrained model "
                "have a value; a band needs at least 2: measure more prompts to which it applies, "
                "or do not watch it"
            )
        mean = present.mean().item()
        collapse_below = COLLAPSE_FRACTION * mean if name in varieties else None
        bands[name] = Band(
            mean,
            present.std().item(),
            len(present),
            collapse_below,
            is_judged_below=name not in JUDGED_ABOVE_ALONE,
        )
    return bands


def find_departures(
    bands: Mapping[str, Band],
    step_values: Mapping[str, Float[Tensor, " P"]],
    margin: float,
) -> tuple[Departure, ...]:
    """Find the canaries whose mean over the prompts of a step is outside their band.

    Args:
        bands: Bands from `make_bands`.
        step_values: One value per prompt of the step, with the same names; NaN for prompts to which
            the canary does not apply. A canary that applies to no prompt is not judged.
        margin: Half the width of a band in standard errors, > 0; see `Band.half_width`.

    Returns:
        Departures in the order of the bands.

    Raises:
        ValueError: The names differ from those of the bands, a value is infinite, or the margin is
            not positive.
    """
    if not margin > 0:
        raise ValueError(f"margin {margin}: must be above 0; 4 standard errors is a usual one")
    if bands.keys() != step_values.keys():
        differing = ", ".join(sorted(bands.keys() ^ step_values.keys()))
        raise ValueError(
            f"canaries {differing}: measured on the untrained model or in this step, but not on "
            "both; each needs a band and a value: measure the same ones"
        )
    departures = []
    for name, band in bands.items():
        present = _present(name, step_values[name])
        if len(present) == 0:
            continue
        mean = present.mean().item()
        low, high = band.limits(len(present), margin)
        if not low <= mean <= high:
            departures.append(Departure(name, mean, low, high))
    return tuple(departures)


def _present(name: str, values: Float[Tensor, " P"]) -> Float64[Tensor, " present"]:
    if values.isinf().any():
        raise ValueError(
            f"canary {name} is {values.tolist()}: values must be finite, or NaN where the canary "
            "does not apply"
        )
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
    counts = torch.zeros(len(pixels), COLOUR_LEVELS**3, dtype=torch.float64, device=pixels.device)
    counts.scatter_add_(1, colours, torch.ones_like(colours, dtype=torch.float64))
    fractions = counts / colours.shape[1]
    nats = torch.special.entr(fractions).sum(dim=1)
    return nats.mean().item() / math.log(2)


def _diversity(values: Float32[Tensor, "G 3 H W"]) -> float:
    if len(values) < 2:
        return math.nan
    small = _small(values)
    return (torch.pdist(small) / math.sqrt(small.shape[1])).mean().item()


def _small(values: Float32[Tensor, "G 3 H W"]) -> Float32[Tensor, "G pixels"]:
    """Scale down, so that noise does not count."""
    height, width = (min(side, DIVERSITY_SIDE) for side in values.shape[2:])
    return adaptive_avg_pool2d(values, (height, width)).flatten(1)
