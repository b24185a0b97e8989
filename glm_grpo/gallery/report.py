"""Reports: tables for terminal and page, pictures for the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import rich.table
from rich.text import Text

from glm_grpo.gallery.pages import render_page
from glm_grpo.gallery.readings import Mark
from glm_grpo.gallery.thumbnails import shrink
from glm_grpo.output import printable
from glm_grpo.run.folder import write_atomically
from glm_grpo.run.summaries import FEWEST_PROMPTS
from glm_grpo.run.tables import SummaryRow

Tone = Literal["", "better", "worse"]
"""What a figure means, which colours it."""
NO_VALUE = "-"
"""Cell of a figure that does not exist."""
SMALL_WIDTH = 256
"""Narrower pictures (pixels) are enlarged on a page with sharp edges."""


@dataclass(frozen=True)
class Cell:
    """A text of a table, on a page coloured by what it means."""

    text: str
    tone: Tone = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """A table for terminal and page.

    Attributes:
        title: In lower case.
        columns: Their heads.
        rows: As many cells each as there are columns; the first names the row.
        note: What the columns mean; may be empty.
        is_text: Cells are texts, not numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    note: str = ""
    is_text: bool = False

    def __rich__(self) -> rich.table.Table:
        """The table in the terminal; what a user wrote is no markup."""
        table = rich.table.Table(
            title=Text(printable(self.title)),
            caption=Text(printable(self.note)) if self.note else None,
            show_lines=self.is_text,
        )
        for index, column in enumerate(self.columns):
            justify: Literal["left", "right"] = "left" if self.is_text or index == 0 else "right"
            table.add_column(Text(printable(column)), justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(printable(str(cell))) for cell in row))
        return table


def show_change(before: float, after: float) -> str:
    """The difference of two figures as they are shown, so that the three agree to the digit."""
    return f"{round(after, 3) - round(before, 3):+z.3f}"


def show_score(score: float | None) -> str:
    """A score of one picture; None where the term does not apply."""
    return "does not apply" if score is None else f"{score:.3f}"


def interval(low: float, high: float) -> str:
    """A 95 % interval of a difference; a dash if there is none."""
    return NO_VALUE if math.isnan(low) else f"[{low:+z.3f}, {high:+z.3f}]"


def interval_note(lows: Iterable[float]) -> str:
    """Note below a table that lacks intervals; empty if none is missing.

    Args:
        lows: Lower ends of the intervals.
    """
    if not any(map(math.isnan, lows)):
        return ""
    return f"{NO_VALUE}: too few prompts for an interval (at least {FEWEST_PROMPTS})"


def change_row(row: SummaryRow) -> tuple[str, ...]:
    """Name, before, after, change and interval."""
    figures = (f"{row.before:z.3f}", f"{row.after:z.3f}", show_change(row.before, row.after))
    return (row.name, *figures, interval(row.low, row.high))


@dataclass(frozen=True)
class Tile:
    """A picture with what is said about it.

    Attributes:
        label: What it is.
        source: Its address, relative to the page; None when the picture is gone.
        link: Where it leads to; None for the picture itself.
        is_small: Enlarged with sharp edges.
        scores: Name and figure of each line.
        texts: That were to appear.
        readings: What OCR terms read, by name, in pieces that are right or wrong.
    """

    label: str
    source: str | None
    link: str | None = None
    is_small: bool = False
    scores: tuple[tuple[str, str], ...] = ()
    texts: tuple[str, ...] = ()
    readings: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict)


def copy_tile(
    path: Path,
    page_dir: Path,
    name: str,
    label: str,
    scores: tuple[tuple[str, str], ...] = (),
) -> Tile:
    """A tile of a small copy of a picture, `pictures/NAME.webp` beside the page.

    Raises:
        StorageError: The copy cannot be written.
    """
    thumbnail = shrink(path)
    if thumbnail is None:
        return Tile(label, None, scores=scores)
    source = f"pictures/{name}.webp"
    write_atomically(page_dir / source, thumbnail.content)
    return Tile(label, source, is_small=thumbnail.width < SMALL_WIDTH, scores=scores)


@dataclass(frozen=True)
class Pictures:
    """The pictures of one prompt, or of another subject.

    Attributes:
        prompt: The caption.
        texts: That should appear.
    """

    prompt: str
    tiles: tuple[Tile, ...]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a page shows, from top to bottom.

    Attributes:
        title: Title of the page.
        summary: Its first paragraphs.
        tables: At least one.
        pictures: None or more.
        about_pictures: Above them.
    """

    title: str
    summary: tuple[str, ...]
    tables: Sequence[Table]
    pictures: Sequence[Pictures] = ()
    about_pictures: str = ""


def write_report(report: Report, directory: Path) -> Path:
    """Write `index.html` of a report, which needs no network, no server and no script.

    Args:
        directory: Made where it does not exist.

    Returns:
        The path of the page.

    Raises:
        StorageError: The page cannot be written.
    """
    path = directory / "index.html"
    write_atomically(path, render_page("report.html.j2", report=report))
    return path
