"""Drawings of what a probe found, as PNG, for pages of light and of dark ground."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float64
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from glm_grpo.gallery.chart_style import (
    DARK,
    FONT_SIZE,
    LIGHT,
    Theme,
    begin_figure,
    style_axes,
    to_png,
)

_FRAME = 0.75
"""Inches of height taken by axis and legend."""
_NAME_WIDTH, _NAME_LINES = 20, 2
"""Names of terms have 40 characters at the most: two lines of 20."""
_MANY_TERMS = 6
"""Beyond this the numbers in a heat map are written smaller."""


@dataclass(frozen=True)
class Bars:
    """One bar for each term.

    Attributes:
        label: In the legend.
        values: One a term; NaN is drawn as a dash.
    """

    label: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Range:
    """What the samples score by one term, and what they might, in units of that term.

    Attributes:
        name: Of the term.
        mean: Of all samples; NaN where the term applies to none.
        best: Mean over the prompts of the best sample of each; likewise.
        reconstruction: Of the targets' own tokens; NaN without targets.
    """

    name: str
    mean: float
    best: float
    reconstruction: float


def draw_bars(
    names: Sequence[str], groups: Sequence[Bars], *, mark: float | None, is_dark: bool
) -> bytes:
    """Draw level bars with their values, those of one term together.

    Args:
        names: Of the terms, from top to bottom, at least one.
        groups: One or two, the main one last.
        mark: Where an upright line is drawn; None for no line.
        is_dark: For a page of dark ground.

    Returns:
        A PNG.
    """
    theme = DARK if is_dark else LIGHT
    figure = begin_figure(theme, height=_FRAME + 0.28 * len(names) * (0.5 + len(groups)))
    axes = _add_axes(figure, theme, row=0, rows=1)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [_drawable(name) for name in names])
    axes.axvline(0.0, color=theme.ink, linewidth=0.8)
    thickness = 0.8 / len(groups)
    handles: list[Artist] = []
    for index, group in enumerate(groups):
        colour = theme.blue if index == len(groups) - 1 else theme.soft
        places = [row - 0.4 + thickness * (index + 0.5) for row in range(len(names))]
        lengths = [0.0 if math.isnan(value) else value for value in group.values]
        handles.append(axes.barh(places, lengths, height=0.9 * thickness, color=colour)[0])
        for place, value in zip(places, group.values, strict=True):
            _write_value(axes, theme, value, place)
    axes.margins(x=0.16)
    if mark is not None:
        axes.axvline(mark, color=theme.vermilion, linewidth=1.2, linestyle="--")
    return _finish(figure, theme, handles, [group.label for group in groups])


def draw_ranges(ranges: Sequence[Range], *, best_label: str, is_dark: bool) -> bytes:
    """Draw for each term, on a scale of its own, where mean, best sample and own tokens lie.

    Args:
        ranges: From top to bottom, at least one.
        best_label: Of the best sample, in the legend.
        is_dark: For a page of dark ground.

    Returns:
        A PNG.
    """
    theme = DARK if is_dark else LIGHT
    figure = begin_figure(theme, height=_FRAME + 0.62 * len(ranges))
    styles = (
        ("mean", "|", theme.ink),
        (best_label, "o", theme.blue),
        ("targets' own tokens", "D", theme.green),
    )
    handles: list[Artist] = []
    for row, scores in enumerate(ranges):
        axes = _add_axes(figure, theme, row=row, rows=len(ranges))
        axes.set_yticks([0.0], [_drawable(scores.name)])
        axes.set_ylim(-1.0, 1.0)
        axes.spines["left"].set_visible(False)
        axes.ticklabel_format(axis="x", useOffset=False)
        values = (scores.mean, scores.best, scores.reconstruction)
        axes.plot([scores.mean, scores.best], [0.0, 0.0], color=theme.blue, linewidth=3.0)
        # A score that is not there leaves the mark out, and keeps the entry of the legend.
        handles = [
            axes.plot(
                value,
                0.0,
                marker,
                color=colour,
                markersize=11.0 if marker == "|" else 7.0,
                markeredgewidth=2.5 if marker == "|" else 0.0,
            )[0]
            for value, (_, marker, colour) in zip(values, styles, strict=True)
        ]
        axes.margins(x=0.08)
        if all(math.isnan(value) for value in values):
            _write_value(axes, theme, math.nan, 0.0)
            axes.set_xticks([])
    return _finish(figure, theme, handles, [label for label, _, _ in styles])


def draw_matrix(names: Sequence[str], values: Float64[Tensor, "R R"], *, is_dark: bool) -> bytes:
    """Draw correlations as a heat map with its numbers.

    Args:
        names: Of rows and columns.
        values: -1..1; NaN is drawn as a dash on the ground of the page.
        is_dark: For a page of dark ground.

    Returns:
        A PNG.
    """
    theme = DARK if is_dark else LIGHT
    figure = begin_figure(theme, height=1.3 + 0.5 * len(names))
    axes = _add_axes(figure, theme, row=0, rows=1)
    axes.grid(visible=False)
    colours = LinearSegmentedColormap.from_list("", [theme.vermilion, theme.ground, theme.blue])
    axes.imshow(values.numpy(), cmap=colours, vmin=-1.0, vmax=1.0, aspect="auto")
    labels = [_drawable(name) for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set_xticks(range(len(names)), labels, rotation=35.0, ha="right", rotation_mode="anchor")
    for row, line in enumerate(values.tolist()):
        for column, value in enumerate(line):
            axes.text(
                column,
                row,
                _format(value),
                color=theme.ink if math.isnan(value) else _readable_on(colours((value + 1.0) / 2)),
                fontsize=FONT_SIZE if len(names) <= _MANY_TERMS else 0.75 * FONT_SIZE,
                ha="center",
                va="center",
            )
    return _finish(figure, theme, [], [])


def _add_axes(figure: Figure, theme: Theme, *, row: int, rows: int) -> Axes:
    axes = figure.add_subplot(rows, 1, row + 1)
    style_axes(axes, theme)
    axes.tick_params(length=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.grid(visible=False)
    return axes


def _write_value(axes: Axes, theme: Theme, value: float, place: float) -> None:
    """Write a value at the end of its bar, away from zero."""
    is_missing = math.isnan(value)
    is_negative = value < 0
    axes.annotate(
        _format(value),
        (0.0 if is_missing else value, place),
        xytext=(-3.0 if is_negative else 3.0, 0.0),
        textcoords="offset points",
        ha="right" if is_negative else "left",
        va="center",
        fontsize=FONT_SIZE,
        color=theme.ink,
    )


def _format(value: float) -> str:
    # 0 is added as a rounded negative number would show as -0.00.
    return "-" if math.isnan(value) else f"{round(value, 2) + 0.0:.2f}"


def _readable_on(colour: tuple[float, float, float, float]) -> str:
    red, green, blue, _ = colour
    is_light = 0.3 * red + 0.6 * green + 0.1 * blue > 0.5
    return LIGHT.ink if is_light else LIGHT.ground


def _finish(
    figure: Figure, theme: Theme, handles: Sequence[Artist], labels: Sequence[str]
) -> bytes:
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside lower left",
            ncols=len(labels),
            frameon=False,
            fontsize=FONT_SIZE,
            labelcolor=theme.ink,
            handletextpad=0.4,
            columnspacing=1.0,
        )
    return to_png(figure)


def _drawable(name: str) -> str:
    """A name on few lines, without the lone surrogates that cannot be drawn."""
    text = name.encode("utf-8", "replace").decode()
    return "\n".join(textwrap.wrap(text, _NAME_WIDTH, max_lines=_NAME_LINES, placeholder="…"))
