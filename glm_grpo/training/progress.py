"""Show progress in the terminal: bars below one line per step, or only lines in a log."""

from __future__ import annotations

import logging
import math
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from glm_grpo.output import describe_bytes, printable
from glm_grpo.run.figures import NO_VALUE, Table, show_change

logger = logging.getLogger(__name__)

_AFTER_TERMS = (
    ("cross-entropy", "sft/cross_entropy"),
    ("kl", "kl/reference"),
    ("clipped", "ratio/clip_fraction"),
)
"""Labels in the line of a step, and their metrics."""
_TERM_MEAN = ("reward/", "/mean")
"""Prefix and suffix of the metric of a term's mean."""
_EVALUATED = "eval/"
_EVALUATION, _CHECKPOINT = "evaluation", "checkpoint"
_BESIDE_STEPS = (_EVALUATION, _CHECKPOINT)
"""Phases that only some steps have."""
_UNITS = {
    "rollout": "tokens",
    "decode": "prompts",
    "reward": "scores",
    "update": "batches",
    "proximal": "batches",
}
"""What each phase counts."""

_BAR_WIDTH = 20
_REFRESHES_PER_SECOND = 4
_RECENT_STEPS = 20
"""Number of steps that determine the pace, which changes in the course of a run."""
_INDENT = "    "
"""Indentation of a step's continuation lines."""
_NO_BREAK = "\N{NO-BREAK SPACE}"


class Progress:
    """Show a run. On a terminal: a bar for the run, one for the current phase, and a line per step.

    Elsewhere: only the lines.

    Args:
        total: Number of training steps.
        done: Steps done before, for a run that resumes.
        console: Console to print to.
        eval_every: Steps between evaluations.
        checkpoint_every: Steps between checkpoints.
        untrained: Metrics of step 0, with which evaluations are compared; None if the run has not
            measured them yet.
        now: Returns the seconds of a monotonic clock.
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
        self._now = now
        self._time_left = _TimeLeft(
            total, {_EVALUATION: eval_every, _CHECKPOINT: checkpoint_every}, now
        )
        self._phase = ""
        self._is_evaluating = False
        self._evaluated_prompts = ""
        self._bars = _Bars(console, total, done, now) if _is_live(console) else None
        # A log that is not a terminal gets the lines, whatever the bars show.
        self._is_logging = self._bars is None or not sys.stdout.isatty()

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def phase(self, name: str) -> None:
        """Show the current phase; inside an evaluation, as a part of it."""
        self._phase = name
        label = f"{_EVALUATION}: {name}" if self._is_evaluating else name
        if not self._is_evaluating:
            self._time_left.begin(name)
            self._is_evaluating = name == _EVALUATION
            self._evaluated_prompts = ""
        if self._bars is not None:
            self._bars.begin(label, beside=self._evaluated_prompts)

    def count(self, done: int, total: int) -> None:
        """Show the progress of the current phase."""
        if self._bars is not None:
            self._bars.count(done, total, _UNITS.get(self._phase, ""))

    def evaluating(self, done: int, total: int) -> None:
        """Show how many held-out prompts are evaluated."""
        self._evaluated_prompts = f"{done}/{total} evaluated"

    def end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the results of a step."""
        left = self._time_left.after(step)
        said_left = [] if left is None else [left.at(self._now())]
        if self._bars is not None:
            self._bars.end(step, [*_figures(metrics), *said_left], left)
        if self._is_logging:
            figures = _figures(metrics, has_evaluation=True)
            logger.info("step %d/%d  %s", step, self._total, "  ".join([*figures, *said_left]))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the held-out scores, and their change since step 0.

        Args:
            step: Evaluated step.
            metrics: Metrics of the evaluation; only those that begin with `eval/` are shown.
        """
        self._is_evaluating = False
        self._time_left.begin("")
        rows = _compare(metrics, self._untrained or {})
        if self._untrained is None:
            self._untrained = dict(metrics)
        if self._bars is not None:
            title = f"held-out prompts at step {step}"
            cells = tuple((name, now, change or NO_VALUE) for name, now, change in rows)
            self._bars.print(Table(title, ("", "now", "since step 0"), cells))
        if self._is_logging:
            figures = "  ".join(
                f"{name} {now} ({change})" if change else f"{name} {now}"
                for name, now, change in rows
            )
            logger.info("evaluation at step %d  %s", step, figures)


@dataclass(frozen=True)
class _RemainingTime:
    """Estimated end of a run.

    Attributes:
        ends: Time of day.
        untimed: Number of further evaluations without an estimate, for instance in a resumed run.
    """

    ends: float
    untimed: int

    def at(self, now: float) -> str:
        """Format the remaining time."""
        left = f"left {timedelta(seconds=max(0, round(self.ends - now)))}"
        if self.untimed == 0:
            return left
        return f"{left} and {self.untimed} evaluation{'s' if self.untimed > 1 else ''}"


class _TimeLeft:
    """Estimate the seconds to the end: steps at their pace, evaluations and checkpoints to come.

    A step is assumed to take the median of the recent steps, excluding the first one observed,
    because the median ignores a step delayed by other load on the machine. An evaluation or a
    checkpoint is assumed to take as long as the last one; checkpoints for a new best evaluation are
    not predicted.

    rich's own estimate knows only one pace for everything, and its default window forgets what is
    older than half a minute, which a single step can exceed.
    """

    def __init__(self, total: int, every: Mapping[str, int], now: Callable[[], float]) -> None:
        self._total, self._every, self._now = total, every, now
        self._phase, self._since = "", now()
        self._last: dict[str, float] = {}
        self._beside_steps = 0.0
        self._step_ended: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def begin(self, phase: str) -> None:
        """Begin a phase, ending the one before it."""
        now = self._now()
        if self._phase in _BESIDE_STEPS:
            self._last[self._phase] = now - self._since
            self._beside_steps += now - self._since
        self._phase, self._since = phase, now

    def after(self, step: int) -> _RemainingTime | None:
        """Estimate the remaining time after a step, without that step's checkpoint.

        None after the first step, which is slower than later ones because of its self-check, and
        when nothing is left that was timed before.
        """
        self.begin("")
        now = self._now()
        before, self._step_ended = self._step_ended, now - self._beside_steps
        if before is None:
            return None
        self._step_seconds.append(self._step_ended - before)
        evaluations = self._to_come(_EVALUATION, step)
        checkpoints = self._to_come(_CHECKPOINT, step - 1)
        seconds = (
            median(self._step_seconds) * (self._total - step)
            + evaluations * self._last.get(_EVALUATION, 0.0)
            + checkpoints * self._last.get(_CHECKPOINT, 0.0)
        )
        untimed = 0 if _EVALUATION in self._last else evaluations
        return _RemainingTime(now + seconds, untimed) if untimed or round(seconds) else None

    def _to_come(self, phase: str, after: int) -> int:
        """How often it is still due: every so many steps, and at the last one."""
        every = self._every[phase]
        is_last_between = self._total % every != 0 and after < self._total
        return self._total // every - after // every + is_last_between


class _Bars:
    """A bar for the run with one for the current phase below; printed lines go above both."""

    def __init__(self, console: Console, total: int, done: int, now: Callable[[], float]) -> None:
        self._console, self._total = console, total
        self._bars = Bars(
            TextColumn("{task.description:<19}"),
            BarColumn(_BAR_WIDTH),
            TextColumn("{task.fields[count]}"),
            _Beside(now),
            console=console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            # The lines tell what the run did, so the bars can disappear.
            transient=True,
            # Output redirected to a file stays there while the bars are on a terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._run = self._bars.add_task(
            "run", total=total, completed=done, count=f"{done}/{total} steps", beside=None
        )
        self._phase = self._bars.add_task("start", total=None, count="", beside="")

    def start(self) -> None:
        before = (sys.stdout, sys.stderr)
        self._bars.start()
        _move_log(before, (sys.stdout, sys.stderr))

    def stop(self) -> None:
        before = (sys.stdout, sys.stderr)
        self._bars.stop()
        _move_log(before, (sys.stdout, sys.stderr))

    def begin(self, label: str, *, beside: str) -> None:
        self._bars.reset(self._phase, description=label, count="", beside=beside)
        # The first count tells the total, if there is one.
        self._bars.tasks[self._phase].total = None

    def count(self, done: int, total: int, unit: str) -> None:
        said = f"{done}/{total} {unit}"
        self._bars.update(self._phase, completed=done, total=total, count=said)

    def end(self, step: int, figures: list[str], left: _RemainingTime | None) -> None:
        said = f"{step}/{self._total} steps"
        self._bars.update(self._run, completed=step, count=said, beside=left)
        self.print(_step_line(step, self._total, figures, width=self._console.width))

    def print(self, what: Table | Text) -> None:
        self._console.print(what)


class _Beside(ProgressColumn):
    """Text next to a bar; its remaining time keeps decreasing during a step."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now

    def render(self, task: Task) -> Text:
        """Render the text for this moment."""
        beside = task.fields["beside"]
        return Text(beside.at(self._now()) if isinstance(beside, _RemainingTime) else beside or "")


def _is_live(console: Console) -> bool:
    """Whether the console can redraw lines; FORCE_COLOR only asks for colours in a log."""
    return console.is_interactive and not console.quiet and console.file.isatty()


def _move_log(before: tuple[TextIO, TextIO], after: tuple[TextIO, TextIO]) -> None:
    """Redirect log handlers to the new stdout and stderr, so that lines appear above the bar."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in before:
            handler.setStream(after[before.index(handler.stream)])


def _figures(metrics: Mapping[str, float], *, has_evaluation: bool = False) -> list[str]:
    """Format the metrics of a step, without undefined ones.

    Args:
        has_evaluation: Whether to include the total of this step's evaluation.
    """
    before, after = _TERM_MEAN
    terms = [
        (printable(name.removeprefix(before).removesuffix(after)), name)
        for name in metrics
        if name.startswith(before) and name.endswith(after) and name.count("/") > 1
    ]
    labels = [("reward", "reward/mean"), *terms, *_AFTER_TERMS]
    if has_evaluation:
        labels.append(("eval", "eval/total"))
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    figures = [f"{label} {finite[name]:z.3f}" for label, name in labels if name in finite]
    if "throughput/images_per_second" in finite:
        figures.append(f"{finite['throughput/images_per_second']:.2f} images/s")
    if "time/step" in finite:
        figures.append(f"{finite['time/step']:.1f} s")
    if "memory/peak_bytes" in finite:
        figures.append(describe_bytes(int(finite["memory/peak_bytes"])))
    return figures


def _step_line(step: int, total: int, figures: list[str], *, width: int) -> Text:
    """Format the line of a step, wrapped between metrics to the terminal's width."""
    head = f"step {step:>{len(str(total))}}/{total}"
    wrapped = textwrap.fill(
        "  ".join(part.replace(" ", _NO_BREAK) for part in (head, *figures)),
        width,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace(_NO_BREAK, " ")
    line = Text(wrapped)
    line.stylize("bold", 0, len(head))
    return line


def _compare(
    metrics: Mapping[str, float], untrained: Mapping[str, int | float | None]
) -> list[tuple[str, str, str]]:
    """Name, value and change of each metric; without a value to compare with, no change."""
    rows = []
    for name, now in metrics.items():
        if not name.startswith(_EVALUATED) or not math.isfinite(now):
            continue
        before = untrained.get(name)
        change = ""
        if before is not None and math.isfinite(before):
            change = show_change(before, now)
        rows.append((name.removeprefix(_EVALUATED), f"{now:z.3f}", change))
    return rows
