"""The report of a probe for the terminal, and as a page with charts."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from jaxtyping import Float32, Float64, UInt8
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from rich.table import Table
from rich.text import Text
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
from glm_grpo.gallery.pages import render_page
from glm_grpo.report.probe.findings import (
    NO_VALUE,
    NOISY_DECODER,
    ProbedDecode,
    ProbedTerm,
    ProbeReport,
    list_findings,
    render,
)
from glm_grpo.run.folder import write_atomically
from rewards.audit.audit import Conflict
from rewards.types import Prompt

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
        values: One a term; NaN is drawn as a dash.
    """

    label: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Range:
    """What the samples score by one term, and what they might, in units of that term.

    Attributes:
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
    return "-" if math.isnan(value) else f"{value:z.2f}"


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


_NO_VALUES = (NO_VALUE,) * 4
"""Of what has no value for the total."""


@dataclass(frozen=True)
class Listing:
    """A table of text.

    Attributes:
        title: In lower case.
        columns: Their heads.
        rows: As many cells each as there are columns.
        note: What the columns mean; may be empty.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def list_figures(report: ProbeReport) -> list[Listing]:
    """The figures of a probe: of each term, and between them where there is more than one."""
    groups = f"{report.prompts} prompts, {report.group_size} samples each"
    listings = [
        Listing(
            f"what drives the advantage: {groups}",
            (
                *("term", "weight", "share"),
                *(("proposed\nweight",) if report.terms[0].proposed_weight is not None else ()),
                *("mean", "std", "std\ninside\ngroups", "flat\ngroups"),
            ),
            tuple(map(_drive_row, report.terms)),
            "share: of the variance of the advantage; std inside groups: the part of the std that "
            "training sees; flat groups: fraction whose images all score the same",
        ),
        Listing(
            "what is left to gain, and what is chance",
            ("term", "headroom", "own tokens", "room", "tied at best", "decoder's part"),
            (*map(_gain_row, report.terms), ("total", render(report.audit.headroom), *_NO_VALUES)),
            f"headroom: best of {report.group_size} less mean; own tokens: score of the decoded "
            "tokens of the targets; room: that less mean; decoder's part: variance under other "
            "noises, relative to that inside groups",
        ),
    ]
    names = report.names()
    if len(names) > 1:
        rows = zip(names, report.audit.correlations.tolist(), strict=True)
        cells = tuple((name, *map(render_share, line)) for name, line in rows)
        listings.append(Listing("correlation inside groups", ("", *names), cells, ""))
    if report.decode is not None:
        listings.append(_decode_listing(report.decode, names))
    return listings


def describe_conflict(conflict: Conflict) -> str:
    """Which terms pull against each other, and how much."""
    return f"{conflict.first} and {conflict.second}: correlation {conflict.correlation:.3f}"


def render_share(value: float) -> str:
    """Three decimals, as shares and correlations are of order 1; a dash for NaN."""
    return NO_VALUE if math.isnan(value) else f"{value:z.3f}"


def _decode_listing(decode: ProbedDecode, names: tuple[str, ...]) -> Listing:
    correlations = (*decode.rank_correlations, decode.total_rank_correlation)
    cheap, full = decode.images_per_second, decode.full_images_per_second
    return Listing(
        "cheaper decode of rollouts",
        ("steps", "images/s", *names, "total"),
        (
            (str(decode.steps), render(cheap), *map(render_share, correlations)),
            (str(decode.full_steps), render(full), *(NO_VALUE for _ in correlations)),
        ),
        f"images/s: drawn, not scored; fewer steps are {cheap / full:.2f} x as fast; terms and "
        "total: rank correlation (Spearman's) inside groups with the scores of the same tokens "
        "decoded in full",
    )


def _drive_row(term: ProbedTerm) -> tuple[str, ...]:
    audit, proposed = term.audit, term.proposed_weight
    return (
        *(audit.name, f"{term.weight:g}", render_share(audit.advantage_share)),
        *(() if proposed is None else (f"{proposed:.4g}",)),
        *(render(audit.mean), render(audit.std), render(audit.std_within)),
        render_share(audit.flat_fraction),
    )


def _gain_row(term: ProbedTerm) -> tuple[str, ...]:
    return (
        *(
            term.audit.name,
            render(term.audit.headroom),
            render(term.reconstruction),
            render(term.room),
        ),
        *(render_share(term.audit.saturation), render_share(term.decoder_fraction)),
    )


def proposed_overrides(report: ProbeReport) -> tuple[str, ...]:
    """`NAME=WEIGHT` for each term, for a command line; none where no weights are proposed."""
    return tuple(
        f"{term.audit.name}={term.proposed_weight:.4g}"
        for term in report.terms
        if term.proposed_weight is not None
    )


_SHOWN_PROMPTS = 8
_SMALLEST_SHARP = 256
"""Pixels: narrower pictures are enlarged with sharp edges."""


@dataclass(frozen=True)
class ProbedPrompt:
    """The samples of one prompt, and what the decoder makes of its target's own tokens.

    Attributes:
        prompt: With its target, if it has one.
        pixels: RGB, 0..255.
        totals: Of the G samples.
        reconstructed_pixels: None without a target.
        reconstruction_total: NaN without a target, and where totals are relative to a group.
    """

    prompt: Prompt
    pixels: UInt8[Tensor, "G 3 H W"]
    totals: Float32[Tensor, " G"]
    reconstructed_pixels: UInt8[Tensor, "3 H W"] | None
    reconstruction_total: float


@dataclass(frozen=True)
class _Tile:
    """A picture on the page; `total` is None where one would say nothing."""

    file: str
    label: str
    total: str | None


def probe_tables(report: ProbeReport) -> list[Table]:
    """What there is to say of a probe, for the terminal: terms, correlations, findings."""
    conflicts = tuple((describe_conflict(conflict),) for conflict in report.conflicts)
    findings = tuple(
        (finding.term, finding.what, finding.remedy) for finding in list_findings(report)
    )
    if not findings:
        findings = (("", "nothing stands out", ""),)
    listings = (
        *list_figures(report),
        Listing("conflicts", ("inside groups, these pull against each other",), conflicts, ""),
        Listing("findings", ("term", "what was found", "what to do"), findings, ""),
    )
    tables = []
    for listing in listings:
        is_text = listing.title in ("conflicts", "findings")
        table = Table(title=listing.title, caption=listing.note or None, show_lines=is_text)
        for index, column in enumerate(listing.columns):
            # Text, not str: what a user wrote is no markup.
            justify: Literal["left", "right"] = "left" if is_text or index == 0 else "right"
            table.add_column(Text(column), justify=justify, overflow="fold")
        for row in listing.rows:
            table.add_row(*map(Text, row))
        if listing.rows:
            tables.append(table)
    return tables


def write_probe(report: ProbeReport, prompts: Sequence[ProbedPrompt], directory: Path) -> Path:
    """Write `index.html` and its pictures; drawings once for light and once for dark pages.

    The page needs no network and no server. Files of the same names are replaced, others stay.

    Args:
        report: What was found.
        prompts: Samples; those of the first eight prompts are shown.
        directory: Made where it does not exist.

    Returns:
        The path of the page.

    Raises:
        StorageError: A file cannot be written.
    """
    descriptions = {}
    for name, description, draw in _drawings(report):
        descriptions[name] = description
        write_atomically(directory / f"{name}.png", draw(is_dark=False))
        write_atomically(directory / f"{name}-dark.png", draw(is_dark=True))
    shown = prompts[:_SHOWN_PROMPTS]
    page = render_page(
        "probe.html.j2",
        report=report,
        findings=list_findings(report),
        conflicts=list(map(describe_conflict, report.conflicts)),
        listings=list_figures(report),
        proposed=" ".join(proposed_overrides(report)),
        descriptions=descriptions,
        shown=[
            (prompt.prompt.prompt, _write_tiles(prompt, number, directory))
            for number, prompt in enumerate(shown, start=1)
        ],
        is_small=any(prompt.pixels.shape[-1] < _SMALLEST_SHARP for prompt in shown),
    )
    path = directory / "index.html"
    write_atomically(path, page)
    return path


def _drawings(report: ProbeReport) -> Iterator[tuple[str, str, Callable[..., bytes]]]:
    """Name, text in place of it, and what draws it."""
    names, audits = report.names(), [term.audit for term in report.terms]
    weights = report.weight_shares()
    shares = tuple(audit.advantage_share for audit in audits)
    bars = [Bars("share of the weights", weights), Bars("share of the advantage", shares)]
    yield (
        "shares",
        _tell(names, "{} of the weights, {} of the advantage", weights, shares),
        partial(draw_bars, names, bars, mark=None),
    )
    means = [audit.mean for audit in audits]
    bests = [audit.mean + audit.headroom for audit in audits]
    own = [term.reconstruction for term in report.terms]
    ranges = [Range(*scores) for scores in zip(names, means, bests, own, strict=True)]
    best_label = f"best of {report.group_size}"
    yield (
        "headroom",
        _tell(names, f"mean {{}}, {best_label} {{}}, targets' own tokens {{}}", means, bests, own),
        partial(draw_ranges, ranges, best_label=best_label),
    )
    parts = tuple(term.decoder_fraction for term in report.terms)
    yield (
        "decoder",
        _tell(names, "{}", parts),
        partial(draw_bars, names, [Bars("decoder's part", parts)], mark=NOISY_DECODER),
    )
    if len(names) > 1:
        pairs = [
            f"{names[first]} and {names[second]} {render_share(value)}"
            for first, line in enumerate(report.audit.correlations.tolist())
            for second, value in enumerate(line)
            if first < second
        ]
        yield (
            "correlations",
            "; ".join(pairs),
            partial(draw_matrix, names, report.audit.correlations),
        )


def _write_tiles(prompt: ProbedPrompt, number: int, directory: Path) -> list[_Tile]:
    """Write sources, target, own tokens, best and worst sample, as far as there are any."""
    totals = prompt.totals.tolist()
    samples = range(len(totals))
    best = max(samples, key=totals.__getitem__)
    # The last of equals, so that a flat group shows two samples.
    worst = min(reversed(samples), key=totals.__getitem__)
    several = len(prompt.prompt.sources) > 1
    sources = (
        (f"source-{number}", f"Source {number}" if several else "Source", pixels, None)
        for number, pixels in enumerate(prompt.prompt.sources, start=1)
    )
    pictures = (
        *sources,
        ("target", "Target", prompt.prompt.target, None),
        ("own", "Target's own tokens", prompt.reconstructed_pixels, prompt.reconstruction_total),
        ("best", f"Best of {len(totals)}", prompt.pixels[best], totals[best]),
        ("worst", f"Worst of {len(totals)}", prompt.pixels[worst], totals[worst]),
    )
    tiles = []
    for name, label, pixels, total in pictures:
        if pixels is not None:
            content = io.BytesIO()
            Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()).save(content, format="PNG")
            path = directory / f"prompt-{number}-{name}.png"
            write_atomically(path, content.getvalue())
            tiles.append(_Tile(path.name, label, None if total is None else render(total)))
    return tiles


def _tell(names: Sequence[str], form: str, *values: Sequence[float]) -> str:
    return "; ".join(
        f"{name}: {form.format(*map(render, figures))}"
        for name, *figures in zip(names, *values, strict=True)
    )
