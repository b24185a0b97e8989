from __future__ import annotations

import io
import logging
import re
import sys
import time
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


def make_progress(*, total: int, done: int = 0, **arguments: Any) -> Progress:
    """Into a log; without an evaluation before the last step."""
    usual = {
        "console": Console(file=io.StringIO()),
        "eval_every": 1000,
        "checkpoint_every": 1000,
    }
    return Progress(total=total, done=done, **{**usual, **arguments})


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
        "step 4/40  reward 0.812  lpips 0.875  ocr 0.500  kl 0.031  clipped 0.000  eval 0.750  "
        "4.25 images/s  15.0 s  1.50 GB"
    ]
    assert console.file.getvalue() == ""


def test_an_evaluation_is_compared_with_that_of_step_0(lines) -> None:
    progress = make_progress(total=40)
    progress.evaluated(0, {"eval/total": 0.5, "eval/ocr": float("nan")})
    progress.evaluated(20, {"eval/total": 0.75, "eval/ocr": 0.25, "reward/mean": 1.0})

    # OCR had no value at step 0, and the reward is none of the evaluation.
    assert lines() == [
        "evaluation at step 0  total 0.500",
        "evaluation at step 20  total 0.750 (+0.250)  ocr 0.250",
    ]


def test_a_resumed_run_compares_with_the_metrics_it_is_given(lines) -> None:
    progress = make_progress(total=40, done=20, untrained={"step": 0, "eval/total": 0.25})
    progress.evaluated(30, {"eval/total": 0.75})
    assert lines() == ["evaluation at step 30  total 0.750 (+0.500)"]


def test_a_terminal_gets_bars_with_lines_and_tables_above_them() -> None:
    terminal = Terminal()
    console = Console(file=terminal, force_interactive=True, width=80, color_system=None)
    progress = make_progress(total=40, eval_every=20, console=console, now=Clock())
    with progress:
        progress.phase("evaluation")
        progress.evaluating(1, 2)
        progress.phase("decode")
        progress.count(3, 4)
        while "3/4 prompts" not in terminal.shown():
            time.sleep(0.01)
        progress.evaluated(0, {"eval/total": 0.5})
        progress.phase("rollout")
        progress.end(1, STEP)
        progress.evaluated(20, {"eval/total": 0.75})

    plain = terminal.shown()
    # The bar of the run, and that of what is at hand.
    assert re.search(r"run +0/40 steps", plain)
    assert re.search(r"evaluation: decode +━{14}\S? +3/4 prompts +1/2 evaluated", plain)
    assert "held-out prompts at step 20" in plain
    assert "+0.250" in plain
    # A line is broken between figures where the terminal is narrow.
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


def test_time_left_counts_the_evaluations_and_checkpoints_to_come(lines) -> None:
    clock = Clock()
    progress = make_progress(total=7, now=clock, eval_every=2, checkpoint_every=3)

    def take(phase: str, seconds: float) -> None:
        progress.phase(phase)
        clock.seconds += seconds

    take("evaluation", 10)
    # Phases inside are parts of it.
    take("decode", 20)
    progress.evaluated(0, {})
    for step in range(1, 8):
        take("rollout", 3)
        take("update", 2)
        if step in (2, 4, 6, 7):
            take("evaluation", 5)
            take("decode", 15)
            progress.evaluated(step, {})
        progress.end(step, {})
        if step in (3, 6, 7):
            take("checkpoint", 7)

    left = [line.partition("left ")[2] for line in lines() if line.startswith("step")]
    # Evaluations take 20 s each, as the last one did, not the 30 s of the first. No checkpoint was
    # made before the end of step 3, so the first of them is not foreseen.
    assert left == [
        "",
        "0:01:25",  # after 2: 5 steps of 5 s, evaluations of 4, 6 and 7
        "0:01:20",  # after 3: 4 steps and the same evaluations
        "0:01:09",  # after 4: 3 steps, evaluations of 6 and 7, checkpoints of 6 and 7
        "0:01:04",
        "0:00:39",  # after 6: its checkpoint, a step, evaluation and checkpoint of 7
        "0:00:07",
    ]


def test_time_left_of_a_resumed_run_names_the_evaluations_it_cannot_time_yet(lines) -> None:
    clock = Clock()
    progress = make_progress(total=10, done=4, now=clock, eval_every=4)
    # The first step, which has the self-check, does not count.
    for step, seconds in ((5, 500), (6, 60)):
        clock.seconds += seconds
        progress.end(step, {})
    assert lines() == ["step 5/10  ", "step 6/10  left 0:04:00 and 2 evaluations"]


def test_time_left_follows_a_pace_that_changed_and_forgives_a_step_that_was_held_up(lines) -> None:
    clock = Clock()
    progress = make_progress(total=100, now=clock)
    for step in range(1, 61):
        clock.seconds += 10 if step <= 30 else 2
        clock.seconds += 100 if step == 55 else 0
        progress.end(step, {})
    # The median of the last 20 steps is 2 s, the mean of all more than 6 s.
    assert lines()[-1].startswith("step 60/100  left 0:01:20")
    progress.end(100, {})
    assert lines()[-1] == "step 100/100  "
