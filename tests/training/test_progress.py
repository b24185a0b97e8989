from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from glm_grpo.training.progress import Progress


class Terminal(io.TextIOWrapper):
    name, mode = "terminal", "w"

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        """All that was written, without what moves and colours."""
        self.flush()
        return re.sub(r"\x1b\[[\d;?]*\w", "", self.buffer.getvalue().decode())


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged so far."""
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def make_progress(*, total: int, **arguments: Any) -> Progress:
    """Into a log, unless a console is given."""
    return Progress(
        **{"total": total, "done": 0, "console": Console(file=io.StringIO()), **arguments}
    )


STEP = {
    "reward/mean": 0.8125,
    "reward/std": 0.1,
    "reward/lpips/mean": 0.875,
    "reward/ocr/mean": 0.5,
    "reward/ocr/std": 0.2,
    "reward/aesthetic/mean": float("nan"),
    "kl/reference": 0.03125,
    "ratio/clip_fraction": 0.0,
    "throughput/images_per_second": 4.25,
    "time/step": 15.04,
    "memory/peak_bytes": 1.5e9,
}
"""Metrics of a step in which the aesthetic term applied to no prompt."""


def test_a_log_has_a_line_a_step_with_terms_speed_and_memory(lines) -> None:
    # FORCE_COLOR, which asks rich for colours in a log, does not ask for bars.
    console = Console(file=io.StringIO(), force_terminal=True)
    with make_progress(total=40, console=console) as progress:
        progress.end(4, {**STEP, "eval/total": 0.75})

    assert lines() == [
        "step  4/40  reward 0.812  lpips 0.875  ocr 0.500  kl 0.031  clipped 0.000  eval 0.750  "
        "4.25 images/s  15.0 s  1.50 GB"
    ]
    assert console.file.getvalue() == ""


def test_an_evaluation_is_compared_with_that_of_step_0(lines) -> None:
    progress = make_progress(total=40)
    progress.evaluated(0, {"eval/total": 0.5})
    progress.evaluated(20, {"eval/total": 0.75, "eval/ocr": 0.25, "reward/mean": 1.0})
    # A resumed run is given the metrics of step 0, in which a term without a value is None.
    resumed = make_progress(total=40, done=20, base={"eval/total": 0.25, "eval/ocr": None})
    resumed.evaluated(30, {"eval/total": 0.75, "eval/ocr": 0.25, "eval/clip": float("nan")})

    assert lines() == [
        "evaluation at step 0  total 0.500",
        "evaluation at step 20  total 0.750 (+0.250)  ocr 0.250",
        "evaluation at step 30  total 0.750 (+0.500)  ocr 0.250",
    ]


def test_a_terminal_gets_bars_with_lines_above_them() -> None:
    terminal = Terminal()
    console = Console(file=terminal, force_interactive=True, width=80, color_system=None)
    progress = make_progress(total=40, console=console, now=Clock())
    with progress:
        progress.evaluated(0, {"eval/total": 0.5})
        progress.end(1, STEP)
        progress.phase("evaluation")
        progress.evaluating(1, 2)
        progress.phase("decode")
        progress.count(3, 4)

    plain = terminal.shown()
    assert re.search(r"run +\S* +1/40 +steps", plain)
    assert re.search(r"evaluation: decode +\S+ +3/4 +prompts .*1/2 evaluated", plain)
    assert "evaluation at step 0  total 0.500" in plain
    # A line that is too long for the terminal breaks between figures.
    assert plain[plain.index("step  1") :].splitlines()[:2] == [
        "step  1/40  reward 0.812  lpips 0.875  ocr 0.500  kl 0.031  clipped 0.000",
        "    4.25 images/s  15.0 s  1.50 GB",
    ]


def test_log_lines_go_above_the_bars_while_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    console = Console(file=terminal, force_interactive=True, color_system=None)
    with make_progress(total=2, console=console):
        assert handler.stream is sys.stderr
        assert handler.stream is not terminal
    assert handler.stream is terminal


def test_time_left_of_a_resumed_run_is_from_the_second_step_on_at_the_pace_so_far(lines) -> None:
    clock = Clock()
    progress = make_progress(total=10, done=4, now=clock)
    for step, seconds in ((5, 500), (6, 60), (10, 60)):
        clock.seconds += seconds
        progress.end(step, {})
    assert lines() == ["step  5/10", "step  6/10  left 0:04:00", "step 10/10"]


def test_a_step_of_flat_groups_is_reported_once(lines: Callable[[], list[str]]) -> None:
    with make_progress(total=3) as progress:
        for step, fraction in ((1, 0.5), (2, 1.0), (3, 1.0)):
            progress.end(step, {**STEP, "advantage/zero_std_fraction": fraction})
    (said,) = (line for line in lines() if "zero-std" in line)
    assert "step 2 " in said
    # Another process of the same run leaves it to the main one.
    with make_progress(total=1, console=Console(file=io.StringIO(), quiet=True)) as progress:
        progress.end(1, {**STEP, "advantage/zero_std_fraction": 1.0})
    assert sum("zero-std" in line for line in lines()) == 1
