"""Format figures of runs, and tables of them for terminal and page."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import rich.table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from glm_grpo.output import printable
from glm_grpo.run.summaries import FEWEST_PROMPTS
from glm_grpo.run.tables import SummaryRow

Tone = Literal["", "better", "worse"]
"""What a figure means, which colours it."""
NO_VALUE = "-"
"""Cell of a figure that does not exist."""
_ENDLESS = 10_000
"""Columns of a terminal in which every table has room."""


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
        spare: Indices of columns that a terminal leaves out while the table is too wide for it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    note: str = ""
    is_text: bool = False
    spare: tuple[int, ...] = ()

    def markdown(self) -> str:
        """The table in Markdown, below its title and above its note."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in lines]
        rows = "".join(f"| {' | '.join(row)} |\n" for row in cells)
        note = f"\n{self.note[0].upper()}{self.note[1:]}.\n" if self.note else ""
        return f"**{self.title}**\n\n{rows}{note}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table in the terminal; what a user wrote is no markup."""
        endless = options.update(width=_ENDLESS)
        for count in range(len(self.spare) + 1):
            table = self._without(self.spare[:count])
            if console.measure(table, options=endless).maximum <= options.max_width:
                break
        yield table

    def _without(self, left_out: Collection[int]) -> rich.table.Table:
        """The table for the terminal without some columns, which the note names."""
        notes = [self.note] if self.note else []
        if left_out:
            names = ", ".join(self.columns[index] for index in sorted(left_out))
            notes.append(f"not shown in so narrow a terminal: {names}")
        table = rich.table.Table(
            title=Text(printable(self.title)),
            caption=Text(printable("; ".join(notes))) if notes else None,
            show_lines=self.is_text,
        )
        shown = [index for index in range(len(self.columns)) if index not in left_out]
        for index in shown:
            justify: Literal["left", "right"] = "left" if self.is_text or index == 0 else "right"
            name = Text(printable(self.columns[index]))
            table.add_column(name, justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(printable(str(row[index]))) for index in shown))
        return table


def show_change(before: float, after: float) -> str:
    """The difference of two figures as they are shown, so that the three agree to the digit."""
    return f"{round(after, 3) - round(before, 3):+z.3f}"


def show_score(score: float | None) -> str:
    """A score of one image; None where the term does not apply, NaN where it refused it."""
    if score is None:
        return "does not apply"
    return NO_VALUE if math.isnan(score) else f"{score:z.3f}"


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
