"""The comparison of runs for the terminal, and as a page with charts and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from rich.text import Text

from glm_grpo.gallery.chart_style import (
    DARK,
    FONT_SIZE,
    LIGHT,
    Theme,
    begin_figure,
    style_axes,
    to_png,
)
from glm_grpo.gallery.pages import render_page
from glm_grpo.gallery.thumbnails import shrink
from glm_grpo.output import printable
from glm_grpo.report.compare.comparison import (
    ComparedPicture,
    ComparedPrompt,
    Comparison,
    Gain,
    TradeOff,
)
from glm_grpo.run.folder import safe_name, write_atomically

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


_FOLDER = "pictures"


@dataclass(frozen=True)
class Copy:
    """A picture that was copied beside the page.

    Attributes:
        name: Path relative to the page.
        width: Pixels.
        height: Pixels.
    """

    name: str
    width: int
    height: int


@dataclass(frozen=True)
class Cell:
    """One picture with its scores.

    Attributes:
        picture: None when the picture is gone.
        scores: The total first, then by term; None where the term does not apply.
        over_first: What the same scores are more than those of the first run; empty for the first
            run itself and for the untrained model.
    """

    picture: Copy | None
    scores: Mapping[str, float | None]
    over_first: Mapping[str, float]


@dataclass(frozen=True)
class Rows:
    """One prompt: a row for each sample.

    Attributes:
        prompt: The caption.
        texts: The texts that should appear.
        has_target: Whether the prompt has a target picture.
        target: None when there is none, or it is gone.
        sources: Of each source picture; None when it is gone.
        samples: Cells of each sample: the untrained model, then every run.
    """

    prompt: str
    texts: tuple[str, ...]
    has_target: bool
    target: Copy | None
    sources: tuple[Copy | None, ...]
    samples: tuple[tuple[Cell, ...], ...]


def write_side_by_side(comparison: Comparison, directory: Path) -> tuple[Rows, ...]:
    """Copy the pictures of all runs, in a small size, beside a page that is to show them.

    Args:
        comparison: The runs.
        directory: Of the page; pictures go into a folder in it.

    Returns:
        The prompts on which runs differ most first, see `spread`.

    Raises:
        StorageError: A file cannot be written.
    """
    prompts = sorted(comparison.side_by_side, key=spread, reverse=True)
    return tuple(_write_rows(prompt, directory) for prompt in prompts)


def spread(prompt: ComparedPrompt) -> float:
    """How far runs differ: the largest mean total over the samples less the smallest."""
    _, *runs = zip(*prompt.samples, strict=True)
    means = [fmean(picture.total for picture in pictures) for pictures in runs]
    return max(means) - min(means)


def _write_rows(prompt: ComparedPrompt, directory: Path) -> Rows:
    stem = f"{_FOLDER}/{safe_name(prompt.prompt_id)}"
    target = prompt.target
    return Rows(
        prompt=prompt.prompt,
        texts=prompt.texts,
        has_target=target is not None,
        target=None if target is None else _copy(target, directory, f"{stem}-target.webp"),
        sources=tuple(
            _copy(source, directory, f"{stem}-source-{number}.webp")
            for number, source in enumerate(prompt.sources)
        ),
        samples=tuple(
            _cells(pictures, directory, f"{stem}-{sample}")
            for sample, pictures in enumerate(prompt.samples)
        ),
    )


def _cells(pictures: Sequence[ComparedPicture], directory: Path, stem: str) -> tuple[Cell, ...]:
    _, first, *others = pictures
    references = (None, None, *(first for _ in others))
    return tuple(
        Cell(
            picture=_copy(picture.path, directory, f"{stem}-{column}.webp"),
            scores=_scores(picture),
            over_first={} if reference is None else _differences(picture, reference),
        )
        for column, (picture, reference) in enumerate(zip(pictures, references, strict=True))
    )


def _differences(picture: ComparedPicture, reference: ComparedPicture) -> dict[str, float]:
    others = _scores(reference)
    return {
        term: score - other
        for term, score in _scores(picture).items()
        if score is not None and (other := others[term]) is not None
    }


def _scores(picture: ComparedPicture) -> dict[str, float | None]:
    return {"total": picture.total, **picture.scores}


def _copy(path: Path, directory: Path, name: str) -> Copy | None:
    """A small copy beside the page; None where there is no whole picture."""
    thumbnail = shrink(path)
    if thumbnail is None:
        return None
    write_atomically(directory / name, thumbnail.content)
    return Copy(name, thumbnail.width, thumbnail.height)


IN_SPREADS = "scores less the untrained model's mean, in units of its std"
"""What totals of `normalize_then_sum` are made of, in evaluations."""


@dataclass(frozen=True)
class _Picture:
    """A picture on the page, in two versions beside it."""

    name: str
    title: str
    description: str


def comparison_tables(comparison: Comparison) -> list[Table]:
    """What there is to say of runs, for the terminal: settings, weights and terms."""
    return [_settings_table(comparison), _totals_table(comparison), _terms_table(comparison)]


def write_comparison(comparison: Comparison, directory: Path, *, has_samples: bool) -> Path:
    """Write `index.html` and its drawings, each for light and for dark pages.

    The page needs no network and no server, and nothing outside its folder. Files of the same
    names are replaced, others stay.

    Args:
        comparison: The runs.
        directory: Made where it does not exist.
        has_samples: Whether the pictures of all runs are shown side by side.

    Returns:
        The path of the page.

    Raises:
        StorageError: A file cannot be written.
    """
    pictures = [_write_curves(comparison, directory)]
    pictures += [
        _write_trade_off(comparison, trade_off, directory) for trade_off in comparison.trade_offs
    ]
    page = render_page(
        "compare.html.j2",
        comparison=comparison,
        weights=_describe_weights(comparison),
        pictures=pictures,
        labels=comparison.labels(),
        side_by_side=write_side_by_side(comparison, directory) if has_samples else (),
    )
    path = directory / "index.html"
    write_atomically(path, page)
    return path


def _write_curves(comparison: Comparison, directory: Path) -> _Picture:
    labels = comparison.labels()
    lines = [
        Line(label, tuple(map(float, run.steps)), run.totals)
        for label, run in zip(labels, comparison.runs, strict=True)
    ]
    name = "curves"
    for is_dark in (False, True):
        content = draw_lines(lines, x_label="step", y_label="total", is_dark=is_dark)
        write_atomically(directory / _file_name(name, is_dark=is_dark), content)
    figures = [
        f"{label} from {run.totals[0]:z.3f} to {run.totals[-1]:z.3f}"
        for label, run in zip(labels, comparison.runs, strict=True)
    ]
    return _Picture(name, "Total against step", "; ".join(figures))


def _write_trade_off(comparison: Comparison, trade_off: TradeOff, directory: Path) -> _Picture:
    x, y = trade_off.x, trade_off.y
    labels = comparison.labels()
    points = [
        Point(label, run.terms[x], run.terms[y], is_marked=is_optimal)
        for label, run, is_optimal in zip(
            labels, comparison.runs, trade_off.is_optimal, strict=True
        )
    ]
    untrained = Point("untrained", comparison.untrained[x], comparison.untrained[y])
    name = f"tradeoff-{x}-{y}"
    for is_dark in (False, True):
        content = draw_points(
            points,
            untrained,
            x_label=_axis(comparison, x),
            y_label=_axis(comparison, y),
            is_dark=is_dark,
        )
        write_atomically(directory / _file_name(name, is_dark=is_dark), content)
    figures = [
        f"{point.label} at {point.x:z.3f}, {point.y:z.3f}{', optimal' if point.is_marked else ''}"
        for point in (untrained, *points)
    ]
    return _Picture(name, f"{y} against {x}", "; ".join(figures))


def _file_name(name: str, *, is_dark: bool) -> str:
    return f"{name}-dark.png" if is_dark else f"{name}.png"


def _axis(comparison: Comparison, term: str) -> str:
    return f"{term} (lower is better)" if comparison.weights.get(term, 0.0) < 0 else term


def _describe_weights(comparison: Comparison) -> str:
    # A term that applies to no prompt has no mean.
    listed = ", ".join(
        f"{printable(name)} {weight:g}"
        f"{'' if name in comparison.untrained else ' (applies to no prompt)'}"
        for name, weight in comparison.weights.items()
    )
    return listed if comparison.combine == "weighted_sum" else f"{listed}; {IN_SPREADS}"


def _settings_table(comparison: Comparison) -> Table:
    table = Table(title="what differs between the runs")
    for name in ("", "run", "setting", "value"):
        table.add_column(name, overflow="fold")
    for number, run in enumerate(comparison.runs, start=1):
        rows = [(_text(key), _text(value)) for key, value in run.settings.items()]
        for index, (key, value) in enumerate(rows or [(Text("nothing"), Text(""))]):
            table.add_row(
                *((str(number), _text(run.shown)) if index == 0 else ("", "")), key, value
            )
        table.add_section()
    return table


def _text(text: str) -> Text:
    # Not str: what a user wrote is no markup.
    return Text(printable(text))


def _totals_table(comparison: Comparison) -> Table:
    table = Table(
        title=f"weights: {_describe_weights(comparison)}",
        caption=f"{comparison.prompts} held-out prompts, {comparison.samples_per_prompt} images "
        "each; 95 % intervals, paired by prompt",
    )
    for name in ("", "step", "before", "after", "gain", "interval", "over run 1", "interval"):
        table.add_column(name, justify="right")
    for number, run in enumerate(comparison.runs, start=1):
        over_first = ("", "") if run.over_first is None else _gain_cells(run.over_first)
        table.add_row(
            str(number),
            str(run.steps[-1]),
            f"{run.totals[0]:z.3f}",
            f"{run.totals[-1]:z.3f}",
            *_gain_cells(run.gain),
            *over_first,
        )
    return table


def _gain_cells(gain: Gain) -> tuple[str, Text]:
    # Text: rich would read the brackets as markup.
    return f"{gain.difference:+z.3f}", Text(f"[{gain.low:+z.3f}, {gain.high:+z.3f}]")


def _terms_table(comparison: Comparison) -> Table:
    caption = (
        f"left out, as not every run scored them alike: {', '.join(map(printable, left_out))}"
        if (left_out := comparison.left_out)
        else None
    )
    table = Table(title="each term, at the last evaluation", caption=caption)
    table.add_column("")
    for name in comparison.untrained:
        table.add_column(_text(name), justify="right")
    rows = [("untrained", comparison.untrained)]
    rows += [(str(number), run.terms) for number, run in enumerate(comparison.runs, start=1)]
    for label, terms in rows:
        table.add_row(label, *(f"{terms[name]:z.3f}" for name in comparison.untrained))
    return table
