"""The drawing of what `benchmarks.growth` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from glm_grpo.gallery.chart_style import FONT_SIZE, LIGHT, begin_figure, style_axes, to_png

_HEIGHT = 8.4
"""Inches, of four drawings above each other."""
_MEGABYTE = 10**6
_BYTES_PER_LOGIT = 4


@dataclass(frozen=True)
class Points:
    """One curve.

    Attributes:
        xs: From left to right.
        ys: One for each of `xs`.
    """

    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Growth:
    """What was measured; bytes are peaks above the model.

    Attributes:
        rates: Tokens a second by images of one prompt.
        rollout_by_group: Bytes by tokens computed of all images, where the group grows.
        rollout_by_side: Likewise, where the image grows.
        update_by_tokens: Bytes by tokens of an image.
        update_by_entries: Bytes by entries of the codebook.
        update_tokens: Of an image in `update_by_entries`.
    """

    rates: Points
    rollout_by_group: Points
    rollout_by_side: Points
    update_by_tokens: Points
    update_by_entries: Points
    cache_bytes: int
    update_tokens: int


def draw_growth(growth: Growth) -> bytes:
    """Four drawings above each other, as PNG."""
    figure = begin_figure(LIGHT, height=_HEIGHT)
    speed, rollout, tokens, entries = figure.subplots(4, 1)
    _begin(speed, "Rollout: tokens a second", "images of one prompt")
    _line(speed, growth.rates, "", "o-")
    speed.set_xscale("log", base=2)
    _label_each(speed, growth.rates.xs)
    _begin(rollout, "Rollout: MB above the model", "images x tokens of each")
    _line(rollout, _in_megabytes(growth.rollout_by_group), "the group grows", "o")
    _line(rollout, _in_megabytes(growth.rollout_by_side), "the image grows", "s")
    most = max(*growth.rollout_by_group.xs, *growth.rollout_by_side.xs)
    cache = Points([0.0, most], [0.0, most * growth.cache_bytes])
    _line(rollout, _in_megabytes(cache), f"cache: {growth.cache_bytes:,} B a token", "--")
    _begin(tokens, "Update: MB above the model", "tokens of an image")
    _line(tokens, _in_megabytes(growth.update_by_tokens), "", "o-")
    _begin(entries, "Update: MB above the model", "entries of the codebook")
    _line(entries, _in_megabytes(growth.update_by_entries), "measured", "o-")
    sizes = growth.update_by_entries.xs
    logits = [size * growth.update_tokens * _BYTES_PER_LOGIT for size in sizes]
    _line(entries, _in_megabytes(Points(sizes, logits)), "one image's logits", "--")
    entries.set_xscale("log", base=2)
    _label_each(entries, sizes)
    for axes in (rollout, entries):
        axes.legend(fontsize=FONT_SIZE, frameon=False, labelcolor=LIGHT.ink)
    for axes in (speed, rollout, tokens, entries):
        axes.set_ylim(bottom=0)
    return to_png(figure)


def _begin(axes: Axes, title: str, x_label: str) -> None:
    style_axes(axes, LIGHT)
    axes.set_title(title, loc="left", fontsize=FONT_SIZE, color=LIGHT.ink)
    axes.set_xlabel(x_label, fontsize=FONT_SIZE, color=LIGHT.ink)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _line(axes: Axes, points: Points, label: str, style: str) -> None:
    color = {"o-": LIGHT.blue, "o": LIGHT.blue, "s": LIGHT.green, "--": LIGHT.vermilion}[style]
    axes.plot(points.xs, points.ys, style, color=color, markersize=5, label=label)


def _label_each(axes: Axes, values: Sequence[float]) -> None:
    axes.set_xticks(values, [f"{value:,.0f}" for value in values])
    axes.xaxis.set_minor_locator(NullLocator())


def _in_megabytes(points: Points) -> Points:
    return Points(points.xs, [value / _MEGABYTE for value in points.ys])
