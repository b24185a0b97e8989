"""Progress in the terminal: a bar with the phase at hand, or plain lines in a log."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

logger = logging.getLogger(__name__)

_ON_BAR = {"reward": "reward/mean", "kl": "kl/reference"}
"""Label beside the bar -> metric; narrow, for terminals of 80 columns."""
_ON_LINE = {
    **_ON_BAR,
    "clipped": "ratio/clip_fraction",
    "eval": "eval/total",
    "step s": "time/step",
}
"""Label in a log -> metric."""
_BAR_WIDTH = 16
_EVALUATED = "eval/"
_EVALUATION, _CHECKPOINT = "evaluation", "checkpoint"
_BESIDE_STEPS = (_EVALUATION, _CHECKPOINT)
"""Phases that do not belong to every step."""


class Progress:
    """Shows a run; a bar on a terminal, one line a step anywhere else.

    Args:
        total: Training steps.
        done: Steps done before (of a run that resumes).
        console: Where to.
        eval_every: Steps from one evaluation to the next.
        checkpoint_every: Steps from one checkpoint to the next.
        untrained: Metrics of step 0, with which evaluations are compared; None where the run has
            yet to make them.
        now: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        *,
        total: int,
        done: int,
        console: Console,
        eval_every: int,
        checkpoint_every: int,
        untrained: Mapping[str, int | float | None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._untrained = untrained
        self._time_left = _TimeLeft(
            total, {_EVALUATION: eval_every, _CHECKPOINT: checkpoint_every}, now
        )
        self._bar: Bar | None = None
        if _is_live(console):
            self._bar = Bar(
                TextColumn("{task.description:<10}"),
                BarColumn(_BAR_WIDTH),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
                # Output that goes to a file while the bar is on a terminal stays in the file.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._task = self._bar.add_task("start", total=total, completed=done, figures="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            before = (sys.stdout, sys.stderr)
            self._bar.start()
            _move_log(before, (sys.stdout, sys.stderr))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            before = (sys.stdout, sys.stderr)
            self._bar.stop()
            _move_log(before, (sys.stdout, sys.stderr))

    def phase(self, name: str) -> None:
        """Says what is being done."""
        self._time_left.begin(name)
        if self._bar is not None:
            self._bar.update(self._task, description=name)

    def end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Says how a step ended."""
        left = self._time_left.after(step)
        if self._bar is not None:
            figures = _figures(_ON_BAR, metrics, left)
            self._bar.update(self._task, completed=step, figures=figures)
        else:
            figures = _figures(_ON_LINE, metrics, left)
            logger.info("step %d/%d  %s", step, self._total, figures)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Says how the held-out prompts scored, and how that changed since step 0.

        Args:
            metrics: Of the evaluation; only names that begin with `eval/` are shown.
        """
        self._time_left.begin("")
        rows = _compare(metrics, self._untrained or {})
        if self._untrained is None:
            self._untrained = dict(metrics)
        if self._bar is not None:
            self._bar.console.print(_table(step, rows))
        else:
            figures = "  ".join(
                f"{name} {now} ({change})" if change else f"{name} {now}"
                for name, now, change in rows
            )
            logger.info("evaluation at step %d  %s", step, figures)


class _TimeLeft:
    """Seconds to the end: steps at their pace, and the evaluations and checkpoints to come.

    The pace is that since the first step that was seen to end. An evaluation or a checkpoint takes
    as long as the last one did; a checkpoint that only a best evaluation brings is not foreseen.

    rich's own estimate knows one pace for all, and with its usual period forgets what is older than
    half a minute, which one step can be.
    """

    def __init__(self, total: int, every: Mapping[str, int], now: Callable[[], float]) -> None:
        self._total, self._every, self._now = total, every, now
        self._phase, self._since = "", now()
        self._last: dict[str, float] = {}
        self._beside_steps = 0.0
        self._first: tuple[int, float] | None = None

    def begin(self, phase: str) -> None:
        """A phase begins, and the one before it ends."""
        now = self._now()
        if self._phase in _BESIDE_STEPS:
            self._last[self._phase] = now - self._since
            self._beside_steps += now - self._since
        self._phase, self._since = phase, now

    def after(self, step: int) -> str:
        """In words, with the number of evaluations where none was timed, as in a resumed run.

        Nothing after the first step, which is slower than those to come: it has its self-check.
        """
        self.begin("")
        spent = self._now() - self._beside_steps
        if self._first is None:
            self._first = (step, spent)
            return ""
        first_step, first_spent = self._first
        seconds = (spent - first_spent) / (step - first_step) * (self._total - step)
        to_come = {phase: self._to_come(phase, step) for phase in _BESIDE_STEPS}
        seconds += sum(count * self._last.get(phase, 0.0) for phase, count in to_come.items())
        left = f"left {timedelta(seconds=round(seconds))}"
        if to_come[_EVALUATION] and _EVALUATION not in self._last:
            left += f" and {to_come[_EVALUATION]} evaluations"
        return left

    def _to_come(self, phase: str, after: int) -> int:
        """How often it is still due: at every so many steps, and at the last."""
        every = self._every[phase]
        is_last_between = self._total % every != 0 and after < self._total
        return self._total // every - after // every + is_last_between


def _is_live(console: Console) -> bool:
    """Whether lines can be drawn again; FORCE_COLOR asks for colours in a log, not for that."""
    return console.is_interactive and console.file.isatty()


def _move_log(before: tuple[TextIO, TextIO], after: tuple[TextIO, TextIO]) -> None:
    """Makes log handlers follow stdout and stderr, so that their lines appear above the bar."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in before:
            handler.setStream(after[before.index(handler.stream)])


def _figures(labels: Mapping[str, str], metrics: Mapping[str, float], time_left: str) -> str:
    parts = [
        f"{label} {metrics[name]:.3f}"
        for label, name in labels.items()
        if name in metrics and math.isfinite(metrics[name])
    ]
    return "  ".join([*parts, time_left] if time_left else parts)


def _compare(
    metrics: Mapping[str, float], untrained: Mapping[str, int | float | None]
) -> list[tuple[str, str, str]]:
    """Name, value and change; the change is empty where there is nothing to compare with."""
    rows = []
    for name, now in metrics.items():
        if not name.startswith(_EVALUATED) or not math.isfinite(now):
            continue
        before = untrained.get(name)
        change = ""
        if before is not None and math.isfinite(before):
            change = f"{now - before:+.3f}"
        rows.append((name.removeprefix(_EVALUATED), f"{now:.3f}", change))
    return rows


def _table(step: int, rows: list[tuple[str, str, str]]) -> Table:
    table = Table("", title=f"held-out prompts at step {step}")
    table.add_column("now", justify="right")
    table.add_column("since step 0", justify="right")
    for name, now, change in rows:
        table.add_row(escape(name), now, change, style="bold" if name == "total" else None)
    return table
