"""Show progress in the terminal: two bars below one line per step, or only the lines in a log."""

from __future__ import annotations

import logging
import math
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from glm_grpo.output import describe_bytes, printable
from glm_grpo.run.figures import show_change

logger = logging.getLogger(__name__)

_AFTER_TERMS = {
    "kl": "kl/reference",
    "clipped": "ratio/clip_fraction",
    "cross-entropy": "sft/cross_entropy",
    "eval": "eval/total",
}
"""Labels in the line of a step, and their metrics."""
_EVALUATION = "evaluation"
_UNITS = {
    "rollout": "tokens",
    "decode": "prompts",
    "reward": "scores",
    "update": "batches",
}
"""What each phase counts."""
_NO_BREAK = "\N{NO-BREAK SPACE}"


class Progress:
    """Show a run. On a terminal: a bar for the run, one for the current phase, and a line per step.

    Elsewhere: only the lines.

    Args:
        total: Number of training steps.
        done: Steps done before, for a run that resumes.
        base: Metrics of step 0, with which evaluations are compared; None if the run has not
            measured them yet.
        now: Returns the seconds of a monotonic clock.
    """

    def __init__(
        self,
        *,
        total: int,
        done: int,
        console: Console,
        base: Mapping[str, int | float | None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._base = base
        self._console = console
        # FORCE_COLOR only asks for colours in a log: the bars need a console that redraws lines.
        self._is_live = console.is_interactive and not console.quiet and console.file.isatty()
        # A log that is not a terminal gets the lines, whatever the bars show.
        self._is_logging = not (self._is_live and sys.stdout.isatty())
        self._phase = ""
        self._is_evaluating = False
        self._is_zero_std_reported = False
        self._evaluated_prompts = ""
        self._bars = rich.progress.Progress(
            TextColumn("{task.description:<19}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[beside]}"),
            console=console,
            # One step may take longer than rich's 30 s; its last 1000 updates count.
            speed_estimate_period=math.inf,
            get_time=now,
            # The lines tell what the run did, so the bars can disappear.
            transient=True,
            # Output redirected to a file stays there while the bars are on a terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._run_bar = self._bars.add_task(
            "run", total=total, completed=done, unit="steps", beside=""
        )
        self._phase_bar = self._bars.add_task("start", total=None, unit="", beside="")

    def __enter__(self) -> Progress:
        if self._is_live:
            _move_log(self._bars.start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_live:
            _move_log(self._bars.stop)

    def phase(self, name: str) -> None:
        """Show the current phase; inside an evaluation, as a part of it."""
        self._phase = name
        label = f"{_EVALUATION}: {name}" if self._is_evaluating else name
        if name == _EVALUATION:
            self._is_evaluating, self._evaluated_prompts = True, ""
        self._bars.remove_task(self._phase_bar)
        self._phase_bar = self._bars.add_task(
            label, total=None, unit="", beside=self._evaluated_prompts
        )

    def count(self, done: int, total: int) -> None:
        """Show the progress of the current phase."""
        unit = _UNITS.get(self._phase, "")
        self._bars.update(self._phase_bar, completed=done, total=total, unit=unit)

    def evaluating(self, done: int, total: int) -> None:
        """Show how many held-out prompts are evaluated."""
        self._evaluated_prompts = f"{done}/{total} evaluated"

    def end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the results of a step, and the time left at the pace so far.

        The pace includes evaluations and checkpoints. It is unknown after the first step, which
        takes longer than later ones because of its self-check.
        """
        self._bars.update(self._run_bar, completed=step)
        seconds = self._bars.tasks[0].time_remaining
        left = [f"left {timedelta(seconds=seconds)}"] if seconds else []
        head = f"step {step:>{len(str(self._total))}}/{self._total}"
        self._print([head, *_figures(metrics), *left])
        is_zero_std = metrics.get("advantage/zero_std_fraction") == 1
        # A quiet console is that of a process beside the main one.
        if is_zero_std and not self._is_zero_std_reported and not self._console.quiet:
            self._is_zero_std_reported = True
            logger.warning(
                "step %d has only zero-std groups (the images of a prompt have equal totals), so "
                "it taught nothing; use other prompts, a larger rollout.group_size or "
                "another reward. Later steps like it are not reported: see "
                "advantage/zero_std_fraction",
                step,
            )

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the held-out scores, metrics that begin with `eval/`, and their change."""
        self._is_evaluating, self._evaluated_prompts = False, ""
        before = self._base or {}
        if self._base is None:
            self._base = dict(metrics)
        figures = [f"evaluation at step {step}"]
        for name, score in metrics.items():
            if not name.startswith("eval/") or not math.isfinite(score):
                continue
            first = before.get(name)
            change = "" if first is None else f" ({show_change(first, score)})"
            figures.append(f"{name.removeprefix('eval/')} {score:z.3f}{change}")
        self._print(figures)

    def _print(self, figures: Sequence[str]) -> None:
        if self._is_live:
            # Break lines between figures, not inside them.
            line = textwrap.fill(
                "  ".join(each.replace(" ", _NO_BREAK) for each in figures),
                self._console.width,
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
            self._console.print(Text(line.replace(_NO_BREAK, " ")))
        if self._is_logging:
            logger.info("%s", "  ".join(figures))


def _move_log(start_or_stop: Callable[[], None]) -> None:
    """Call rich, which replaces stdout and stderr, and let log handlers write to the new ones.

    Their lines then appear above the bars.
    """
    before = (sys.stdout, sys.stderr)
    start_or_stop()
    after = (sys.stdout, sys.stderr)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in before:
            handler.setStream(after[before.index(handler.stream)])


def _figures(metrics: Mapping[str, float]) -> list[str]:
    """Format the metrics of a step, without undefined ones."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    parts = {name: name.split("/") for name in finite}
    terms = {
        printable(each[1]): name
        for name, each in parts.items()
        if len(each) == 3 and each[0] == "reward" and each[2] == "mean"
    }
    labels = {"reward": "reward/mean", **terms, **_AFTER_TERMS}
    figures = [f"{label} {finite[name]:z.3f}" for label, name in labels.items() if name in finite]
    if "throughput/images_per_second" in finite:
        figures.append(f"{finite['throughput/images_per_second']:.2f} images/s")
    if "time/step" in finite:
        figures.append(f"{finite['time/step']:.1f} s")
    if "memory/peak_bytes" in finite:
        figures.append(describe_bytes(int(finite["memory/peak_bytes"])))
    return figures
