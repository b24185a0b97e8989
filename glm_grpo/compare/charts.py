"""Drawings of figures as PNG, for pages and documents, on light and on dark ground."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from glm_grpo.gallery.chart_style import (
    DARK,
    FONT_SIZE,
    LIGHT,
    Theme,
    begin_figure,
    style_axes,
    to_png,
)

_HEIGHT = 3.0
"""Inches, the legend aside."""
_LEGEND_LINE = 0.22
"""Inches."""
_MOST_TICKS = 6
_MARKERS = "osD^v"
"""Five of them beside six colours: thirty lines before two look alike."""


@dataclass(frozen=True)
class Line:
    """One line of a drawing.

    Attributes:
        label: In the legend.
        xs: From left to right.
        ys: One for each of `xs`.
    """

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """One point of a drawing.

    Attributes:
        label: In the legend.
        x: To the right.
        y: Upwards.
        is_marked: Drawn with a ring, and joined to the other marked points.
    """

    label: str
    x: float
    y: float
    is_marked: bool = False


def draw_lines(lines: Sequence[Line], *, x_label: str, y_label: str, is_dark: bool) -> bytes:
    """Draw lines over a horizontal axis of whole numbers.

    Args:
        lines: At least one, each with at least one point.
        x_label: Below the horizontal axis.
        y_label: Beside the vertical axis.
        is_dark: For a page of dark ground.

    Returns:
        A PNG.
    """
    theme = DARK if is_dark else LIGHT
    figure, axes = _begin(theme, x_label, y_label, entries=len(lines))
    axes.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS, integer=True))
    handles: list[Artist] = []
    for index, line in enumerate(lines):
        handles += axes.plot(line.xs, line.ys, linewidth=1.8, **_style(index, theme))
    return _finish(figure, theme, handles, [line.label for line in lines])


def draw_points(
    points: Sequence[Point], reference: Point, *, x_label: str, y_label: str, is_dark: bool
) -> bytes:
    """Draw points, those that are marked with a ring and joined by a broken line.

    Args:
        points: In the order, and so with the colours, of the lines of `draw_lines`.
        reference: What they are seen against, drawn as a cross.
        x_label: Below the horizontal axis.
        y_label: Beside the vertical axis.
        is_dark: For a page of dark ground.

    Returns:
        A PNG.
    """
    theme = DARK if is_dark else LIGHT
    figure, axes = _begin(theme, x_label, y_label, entries=len(points) + 2)
    axes.margins(0.12)
    axes.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS))
    ring: dict[str, Any] = {
        "color": theme.ink,
        "marker": "o",
        "markersize": 13.0,
        "markerfacecolor": "none",
    }
    marked = sorted((point.x, point.y) for point in points if point.is_marked)
    axes.plot([x for x, _ in marked], [y for _, y in marked], linestyle=":", linewidth=1.0, **ring)
    handles: list[Artist] = list(
        axes.plot(reference.x, reference.y, "x", color=theme.ink, markersize=8.0)
    )
    for index, point in enumerate(points):
        handles += axes.plot(point.x, point.y, linestyle="none", **_style(index, theme))
    handles.append(Line2D([], [], linestyle=":", linewidth=1.0, **ring))
    labels = [reference.label, *(point.label for point in points), "Pareto-optimal"]
    return _finish(figure, theme, handles, labels)


def _style(index: int, theme: Theme) -> dict[str, Any]:
    return {
        "color": theme.series[index % len(theme.series)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 6.0,
    }


def _begin(theme: Theme, x_label: str, y_label: str, *, entries: int) -> tuple[Figure, Axes]:
    figure = begin_figure(theme, height=_HEIGHT + _LEGEND_LINE * entries)
    axes = figure.add_subplot()
    style_axes(axes, theme)
    axes.set_xlabel(_drawable(x_label), color=theme.ink)
    axes.set_ylabel(_drawable(y_label), color=theme.ink)
    return figure, axes


def _finish(
    figure: Figure, theme: Theme, handles: Sequence[Artist], labels: Sequence[str]
) -> bytes:
    figure.legend(
        handles,
        [_drawable(label) for label in labels],
        loc="outside lower left",
        frameon=False,
        fontsize=FONT_SIZE,
        labelcolor=theme.ink,
    )
    return to_png(figure)


def _drawable(text: str) -> str:
    """One line, without the lone surrogates of file names that are no UTF-8."""
    return " ".join(text.encode("utf-8", "replace").decode().split())
