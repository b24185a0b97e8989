"""Common style of matplotlib drawings: sizes, colours for light and dark ground, PNG."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

_FIGURE_WIDTH = 4.4
"""Inches: scaled to the width of a phone, the text can still be read."""
FONT_SIZE = 9.0
_DOTS_PER_INCH = 200


@dataclass(frozen=True)
class Theme:
    """Colours of a drawing.

    Attributes:
        ground: Behind everything.
        grid: Of lines that help to read a figure.
        soft: Of what stands beside the main figures.
        blue: Of the main figures, and of what is high.
        vermilion: Of limits, and of what is low.
    """

    ground: str
    ink: str
    grid: str
    soft: str
    blue: str
    vermilion: str
    green: str
    others: tuple[str, ...]

    @property
    def series(self) -> tuple[str, ...]:
        """Six colours, in the order in which kinds get them."""
        return (self.blue, self.vermilion, self.green, *self.others)


LIGHT = Theme(
    ground="#ffffff",
    ink="#1c1d21",
    grid="#dcdde2",
    soft="#b9bbc4",
    # Okabe and Ito's colours for all kinds of sight, the yellow ones darkened.
    blue="#0072b2",
    vermilion="#d55e00",
    green="#009e73",
    others=("#cc79a7", "#8a6d00", "#3a9bd0"),
)
DARK = Theme(
    ground="#1e2026",
    ink="#ececf0",
    grid="#363943",
    soft="#666a76",
    blue="#6db3f2",
    vermilion="#ff9d5c",
    green="#4fd1a5",
    others=("#f0a6cb", "#e6c35a", "#a8d8f5"),
)


def begin_figure(theme: Theme, *, height: float) -> Figure:
    """An empty figure of the common width.

    Args:
        theme: Its colours.
        height: Inches.
    """
    size = (_FIGURE_WIDTH, height)
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained", facecolor=theme.ground)
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes, theme: Theme) -> None:
    """Give axes the colours of a theme, and no frame but at the left and at the bottom."""
    axes.set_facecolor(theme.ground)
    axes.tick_params(colors=theme.ink, labelsize=FONT_SIZE)
    axes.grid(color=theme.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.grid)


def to_png(figure: Figure) -> bytes:
    """A figure as PNG, the same bytes for the same drawing; its texts are taken as they are."""
    for text in figure.findobj(Text):
        # A dollar sign in a name begins no formula.
        text.set_parse_math(False)
    content = io.BytesIO()
    with warnings.catch_warnings():
        # A sign that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
