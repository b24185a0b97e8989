"""Compare two ways of doing the same work: repeats in turns, ratios, a table and a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
"""Root of the project, where benchmarks start their processes."""


@dataclass(frozen=True)
class Target:
    """Bound with which a ratio is compared.

    Attributes:
        kind: Whether the ratio must reach the bound or stay below it.
    """

    kind: Literal["at least", "at most"]
    bound: float

    def is_held_by(self, ratio: float) -> bool:
        """Whether a ratio meets the target."""
        return ratio >= self.bound if self.kind == "at least" else ratio <= self.bound


@dataclass(frozen=True)
class Result:
    """Ours and theirs, doing the same work on the same machine, in turns.

    Attributes:
        phase: What was measured, and its size.
        against: What ours is compared with.
        unit: Unit of `ours` and `theirs`.
        ours: Our median.
        theirs: Their median.
        ratio: Ours over theirs.
        lowest: Smallest ratio of one repeat.
        highest: Largest ratio of one repeat.
        command: Command that repeats the measurement.
        target: Target of the ratio; None if the value is only observed.
        details: Further values by name.
    """

    phase: str
    against: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    lowest: float
    highest: float
    command: str
    target: Target | None = None
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """`held` or `missed`; empty without a target."""
        if self.target is None:
            return ""
        return "held" if self.target.is_held_by(self.ratio) else "missed"


@dataclass(frozen=True)
class Labels:
    """Texts of a `Result`; see there."""

    phase: str
    against: str
    unit: str
    command: str


def compare(
    labels: Labels,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    target: Target | None = None,
    details: Mapping[str, float] | None = None,
) -> Result:
    """Medians and ratios of values measured in turns, one pair per repeat.

    Args:
        labels: Texts.
        ours: Our value of each repeat.
        theirs: Their value of each repeat.
        target: Target of the ratio of the medians.
        details: Further values by name.
    """
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return Result(
        **asdict(labels),
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        ratio=statistics.median(ours) / statistics.median(theirs),
        lowest=min(ratios),
        highest=max(ratios),
        target=target,
        details=details or {},
    )


def in_turns(works: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each work, after one warm-up run of each.

    Works take turns, so that a busy machine affects all alike. Every second round runs backwards,
    so that no work always follows the same other one.
    """
    for work in works.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats):
        names = list(works) if repeat % 2 == 0 else list(works)[::-1]
        for name in names:
            started = time.perf_counter()
            works[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def rates(amount: float, seconds: Sequence[float]) -> list[float]:
    """Amount per second of each repeat."""
    return [amount / value for value in seconds]


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a command line with the options that all benchmarks share.

    Args:
        description: The module's docstring, of which only the first line is shown.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="of each side, in turns")
    parser.add_argument("--json", type=Path, help="file for results and machine")
    return parser


def publish(results: Sequence[Result], path: Path | None) -> None:
    """Print the table, and write the JSON file if requested."""
    Console(width=None if Console().is_terminal else 140).print(results_table(results))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"machine": machine(), "results": [to_json(result) for result in results]}
        path.write_text(json.dumps(document, indent=2) + "\n")


def results_table(results: Sequence[Result]) -> Table:
    """Make a row per result."""
    table = Table(caption=f"{torch.get_num_threads()} threads; spread: smallest to largest ratio")
    for column in ("phase", "against"):
        table.add_column(column)
    for column in ("ours", "theirs", "ratio", "spread"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    table.add_column("target", justify="right")
    table.add_column("")
    for result in results:
        target = result.target
        sign = {"at least": ">=", "at most": "<="}
        table.add_row(
            result.phase,
            result.against,
            _short(result.ours),
            _short(result.theirs),
            f"{result.ratio:.2f}",
            f"{result.lowest:.2f} to {result.highest:.2f}",
            result.unit,
            "" if target is None else f"{sign[target.kind]} {target.bound:g}",
            result.verdict,
        )
    return table


def to_json(result: Result) -> dict[str, Any]:
    """Convert a result to JSON values, with its verdict."""
    return {**asdict(result), "verdict": result.verdict}


def from_json(value: Mapping[str, Any]) -> Result:
    """Convert the values from `to_json` back."""
    known = {name: part for name, part in value.items() if name != "verdict"}
    target = value["target"]
    return Result(**{**known, "target": None if target is None else Target(**target)})


def machine() -> dict[str, str | int]:
    """Properties of the machine that affect the results."""
    packages = ("torch", "transformers", "diffusers", "onnxruntime")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def _short(value: float) -> str:
    """Format with three significant digits, without exponents."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
