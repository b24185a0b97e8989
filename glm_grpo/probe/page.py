"""What a probe found: for the terminal, and as a page with pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from jaxtyping import Float32, UInt8
from PIL import Image
from rich.table import Table
from rich.text import Text
from torch import Tensor

from glm_grpo.gallery import pages
from glm_grpo.probe.charts import Bars, Range, draw_bars, draw_matrix, draw_ranges
from glm_grpo.probe.findings import NOISY_DECODER, ProbeReport, list_findings, render
from glm_grpo.probe.listings import (
    Listing,
    describe_conflict,
    list_figures,
    render_share,
)
from glm_grpo.run.folder import write_atomically
from rewards.types import Prompt

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
    page = pages.render(
        "probe.html.j2",
        report=report,
        findings=list_findings(report),
        conflicts=list(map(describe_conflict, report.conflicts)),
        listings=list_figures(report),
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
    """Write target, own tokens, best and worst sample, as far as there are any."""
    totals = prompt.totals.tolist()
    samples = range(len(totals))
    best = max(samples, key=totals.__getitem__)
    # The last of equals, so that a flat group shows two samples.
    worst = min(reversed(samples), key=totals.__getitem__)
    pictures = (
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
