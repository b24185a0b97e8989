"""Runs held against one yardstick: for the terminal, and as a page with pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.table import Table
from rich.text import Text

from glm_grpo.report.charts import Line, Point, draw_lines, draw_points
from glm_grpo.storage import write_atomically

_LONGEST_LABEL = 44
"""Characters that fit into the legend of a picture."""


@dataclass(frozen=True)
class Gain:
    """A mean difference, paired by prompt, with its 95 % interval.

    Attributes:
        difference: Mean over the prompts.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class ComparedRun:
    """One run on the held-out prompts.

    Attributes:
        name: The shortest end of its path that no other run's path has.
        settings: What of its config differs between the runs, by dotted key, as text.
        steps: Policy steps of its evaluations, in order, at least two.
        totals: Mean total by the yardstick at each of `steps`.
        gain: Of the yardstick total, from the first evaluation to the last.
        over_first: The last total less that of the first run; None for the first run itself.
        terms: Mean raw score of each term at the last evaluation.
    """

    name: str
    settings: Mapping[str, str]
    steps: tuple[int, ...]
    totals: tuple[float, ...]
    gain: Gain
    over_first: Gain | None
    terms: Mapping[str, float]


@dataclass(frozen=True)
class TradeOff:
    """Two terms against each other.

    Attributes:
        x: Name of one term.
        y: Name of the other.
        is_optimal: For each run, whether neither another run nor the untrained model is at least
            as good in both terms and better in one (Pareto).
    """

    x: str
    y: str
    is_optimal: tuple[bool, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs judged by one yardstick on the same held-out prompts.

    Attributes:
        yardstick: Weight by name of the term; totals are weighted sums of raw scores.
        prompts: Number of held-out prompts.
        samples_per_prompt: Images of each.
        runs: In the order they were named.
        untrained: Mean raw score of each term at the first evaluation of the first run.
        trade_offs: Pairs of terms; empty with a single term.
        left_out: Terms that not every run scored in the same way.
    """

    yardstick: Mapping[str, float]
    prompts: int
    samples_per_prompt: int
    runs: tuple[ComparedRun, ...]
    untrained: Mapping[str, float]
    trade_offs: tuple[TradeOff, ...]
    left_out: tuple[str, ...]

    def labels(self) -> tuple[str, ...]:
        """A short name for each run: what differs where that is short, else the run's own name."""
        texts = [_short_settings(run.settings) for run in self.runs]
        if not all(0 < len(text) <= _LONGEST_LABEL for text in texts):
            texts = [run.name for run in self.runs]
        return tuple(f"{number}: {text}" for number, text in enumerate(texts, start=1))


@dataclass(frozen=True)
class _Picture:
    """A picture on the page, in two versions beside it."""

    name: str
    title: str
    description: str


def comparison_tables(comparison: Comparison) -> list[Table]:
    """What there is to say of runs, for the terminal: settings, yardstick and terms."""
    return [_settings_table(comparison), _totals_table(comparison), _terms_table(comparison)]


def write_comparison(comparison: Comparison, directory: Path) -> Path:
    """Write `index.html` and its pictures, each for light and for dark pages.

    The page needs no network and no server. Files of the same names are replaced, others stay.

    Args:
        comparison: The runs.
        directory: Made where it does not exist.

    Returns:
        The path of the page.

    Raises:
        StorageError: A file cannot be written.
    """
    pictures = [_write_curves(comparison, directory)]
    pictures += [
        _write_trade_off(comparison, trade_off, directory) for trade_off in comparison.trade_offs
    ]
    environment = Environment(
        loader=PackageLoader("glm_grpo.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("compare.html.j2").render(
        comparison=comparison, yardstick=_describe_yardstick(comparison), pictures=pictures
    )
    path = directory / "index.html"
    # A lone surrogate in the name of a folder has no UTF-8 form.
    write_atomically(path, page.encode("utf-8", "replace"))
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


def _short_settings(settings: Mapping[str, str]) -> str:
    """`ocr.weight=0.3` for reward.terms.ocr.weight."""
    return ", ".join(f"{'.'.join(key.split('.')[-2:])}={value}" for key, value in settings.items())


def _describe_yardstick(comparison: Comparison) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in comparison.yardstick.items())


def _settings_table(comparison: Comparison) -> Table:
    table = Table(title="what differs between the runs")
    for name in ("", "run", "setting", "value"):
        table.add_column(name, overflow="fold")
    for number, run in enumerate(comparison.runs, start=1):
        # Text, not str: what a user wrote is no markup.
        rows = [(Text(key), Text(value)) for key, value in run.settings.items()]
        for index, (key, value) in enumerate(rows or [(Text("nothing"), Text(""))]):
            table.add_row(*((str(number), Text(run.name)) if index == 0 else ("", "")), key, value)
        table.add_section()
    return table


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
        f"left out, as not every run scored them alike: {', '.join(comparison.left_out)}"
        if comparison.left_out
        else None
    )
    table = Table(title="each term, at the last evaluation", caption=caption)
    table.add_column("")
    for name in comparison.untrained:
        table.add_column(name, justify="right")
    rows = [("untrained", comparison.untrained)]
    rows += [(str(number), run.terms) for number, run in enumerate(comparison.runs, start=1)]
    for label, terms in rows:
        table.add_row(label, *(f"{terms[name]:.3f}" for name in comparison.untrained))
    return table
