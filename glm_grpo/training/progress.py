"""What a run tells the terminal: a bar with the phase at hand, or plain lines in a log."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

logger = logging.getLogger(__name__)

_SHOWN = {
    "reward": "reward/mean",
    "kl": "kl/reference",
    "clipped": "ratio/clip_fraction",
    "eval": "eval/total",
    "ocr": "eval/ocr",
    "step s": "time/step",
}
"""Label on the terminal -> metric."""


class Progress:
    """Shows a run; a bar on a terminal, one line a step anywhere else.

    Args:
        total: Training steps.
        done: Steps done before (of a run that resumes).
        console: Where to.
    """

    def __init__(self, *, total: int, done: int, console: Console) -> None:
        self._total = total
        self._bar: Bar | None = None
        if console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description:<10}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
            )
            self._task = self._bar.add_task("start", total=total, completed=done, figures="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, name: str) -> None:
        """Says what is being done."""
        if self._bar is not None:
            self._bar.update(self._task, description=name)

    def end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Says how a step ended."""
        figures = "  ".join(
            f"{label} {metrics[name]:.3f}"
            for label, name in _SHOWN.items()
            if name in metrics and math.isfinite(metrics[name])
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
        else:
            logger.info("step %d/%d  %s", step, self._total, figures)
