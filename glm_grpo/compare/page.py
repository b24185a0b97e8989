"""Runs held against one yardstick, for the terminal and as a page with pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from glm_grpo.compare.charts import Line, Point, draw_lines, draw_points
from glm_grpo.compare.comparison import Comparison, Gain, TradeOff
from glm_grpo.compare.pictures_page import write_side_by_side
from glm_grpo.gallery import pages
from glm_grpo.run.folder import write_atomically
from glm_grpo.terminal import printable

IN_SPREADS = "scores less the untrained model's mean, in units of its std"
"""What totals of `normalize_then_sum` are made of, in evaluations."""


@dataclass(frozen=True)
class _Picture:
    """A picture on the page, in two versions beside it."""

    name: str
    title: str
    description: str


def comparison_tables(comparison: Comparison) -> list[Table]:
    """What there is to say of runs, for the terminal: settings, yardstick and terms."""
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
    page = pages.render(
        "compare.html.j2",
        comparison=comparison,
        yardstick=_describe_yardstick(comparison),
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
        content = draw_lines(lines, x_label="step", y_label="yardstick total", is_dark=is_dark)
        write_atomically(directory / _file_name(name, is_dark=is_dark), content)
    figures = [
        f"{label} from {run.totals[0]:.3f} to {run.totals[-1]:.3f}"
        for label, run in zip(labels, comparison.runs, strict=True)
    ]
    return _Picture(name, "Yardstick total against step", "; ".join(figures))


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
        f"{point.label} at {point.x:.3f}, {point.y:.3f}{', optimal' if point.is_marked else ''}"
        for point in (untrained, *points)
    ]
    return _Picture(name, f"{y} against {x}", "; ".join(figures))


def _file_name(name: str, *, is_dark: bool) -> str:
    return f"{name}-dark.png" if is_dark else f"{name}.png"


def _axis(comparison: Comparison, term: str) -> str:
    return f"{term} (lower is better)" if comparison.yardstick.get(term, 0.0) < 0 else term


def _describe_yardstick(comparison: Comparison) -> str:
    weights = comparison.yardstick.items()
    listed = ", ".join(f"{printable(name)} {weight:g}" for name, weight in weights)
    return listed if comparison.combine == "weighted_sum" else f"{listed}; {IN_SPREADS}"


def _settings_table(comparison: Comparison) -> Table:
    table = Table(title="what differs between the runs")
    for name in ("", "run", "setting", "value"):
        table.add_column(name, overflow="fold")
    for number, run in enumerate(comparison.runs, start=1):
        rows = [(_text(key), _text(value)) for key, value in run.settings.items()]
        for index, (key, value) in enumerate(rows or [(Text("nothing"), Text(""))]):
            table.add_row(*((str(number), _text(run.name)) if index == 0 else ("", "")), key, value)
        table.add_section()
    return table


def _text(text: str) -> Text:
    # Not str: what a user wrote is no markup.
    return Text(printable(text))


def _totals_table(comparison: Comparison) -> Table:
    table = Table(
        title=f"yardstick: {_describe_yardstick(comparison)}",
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
            f"{run.totals[0]:.3f}",
            f"{run.totals[-1]:.3f}",
            *_gain_cells(run.gain),
            *over_first,
        )
    return table


def _gain_cells(gain: Gain) -> tuple[str, Text]:
    # Text: rich would read the brackets as markup.
    return f"{gain.difference:+.3f}", Text(f"[{gain.low:+.3f}, {gain.high:+.3f}]")


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
        table.add_row(label, *(f"{terms[name]:.3f}" for name in comparison.untrained))
    return table
