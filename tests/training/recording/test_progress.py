from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from glm_grpo.training.recording.progress import Progress

ROOT = Path(__file__).parents[3]

RUN = """
import logging, sys, time
from rich.console import Console
from glm_grpo.training.recording.progress import Progress

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
with Progress(
    total=3, done=0, console=Console(stderr=True), eval_every=3, checkpoint_every=3
) as progress:
    progress.phase("evaluation")
    progress.evaluating(1, 2)
    progress.phase("decode")
    progress.count(3, 4)
    time.sleep(0.3)
    progress.evaluated(0, {"eval/total": 0.5})
    for step in (1, 2, 3):
        progress.phase("rollout")
        logging.getLogger("glm_grpo").warning("canary of step %d", step)
        progress.end(step, {"reward/mean": 0.25, "kl/reference": 0.125})
    progress.evaluated(3, {"eval/total": 0.75})
"""
"""What a run does with its progress, in a process of its own."""


def environment(**variables: str) -> dict[str, str]:
    """This process's, without what says how to draw."""
    unset = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "TERM")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "TERM": "xterm-256color", **variables}


def printed_to_a_pipe(**variables: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
    )
    return ended.stdout.decode()


def printed_to_a_terminal(**variables: str) -> str:
    """Output of the same on a pseudo-terminal of 100 columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        cwd=ROOT,
        env=environment(COLUMNS="100", **variables),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    content = b""
    while chunk := read_chunk(ours):
        content += chunk
    os.close(ours)
    assert process.wait() == 0
    return content.decode()


def read_chunk(descriptor: int) -> bytes:
    """Empty at the end, which Linux reports as an error once the other side is closed."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_output_to_a_pipe_is_plain_lines(variables: dict[str, str]) -> None:
    printed = printed_to_a_pipe(**variables)

    assert "\x1b" not in printed
    assert "\r" not in printed
    lines = printed.splitlines()
    assert lines[0] == "evaluation at step 0  total 0.500"
    assert lines[1:3] == ["canary of step 1", "step 1/3  reward 0.250  kl 0.125"]
    assert lines[4].startswith("step 2/3  reward 0.250  kl 0.125  left 0:00:0")
    assert lines[-1] == "evaluation at step 3  total 0.750 (+0.250)"
    assert len(lines) == 8


def test_a_terminal_gets_bars_with_lines_and_tables_above_them() -> None:
    printed = printed_to_a_terminal()

    plain = re.sub(r"\x1b\[[\d;?]*\w", "", printed)
    # The bar of the run, and that of what is at hand.
    assert re.search(r"run +━+ 0/3 steps", plain)
    assert re.search(r"evaluation: decode +━+[╸╺]━+ 3/4 prompts 1/2 evaluated", plain)
    assert re.search(r"run +━+[╸╺]━+ 2/3 steps left 0:00:0\d", plain)
    for step, left in ((1, ""), (2, r"  left 0:00:0\d"), (3, r"  left 0:00:00")):
        assert re.search(rf"\rstep {step}/3  reward 0.250  kl 0.125{left}\r\n", plain)
    assert "held-out prompts at step 3" in printed
    assert "+0.250" in printed
    # A log line begins where the bar stood, not behind it.
    for step in (1, 2, 3):
        before, _ = printed.split(f"canary of step {step}")
        assert before.endswith(("\x1b[2K", "\n"))


def test_no_color_is_respected() -> None:
    coloured, plain = printed_to_a_terminal(), printed_to_a_terminal(NO_COLOR="1")

    assert "\x1b[38;5;" in coloured or "\x1b[3" in coloured
    assert "\x1b[38;5;" not in plain
    assert "\x1b[32m" not in plain


def test_a_dumb_terminal_gets_plain_lines() -> None:
    printed = printed_to_a_terminal(TERM="dumb")

    assert "\x1b" not in printed
    assert "step 3/3  reward 0.250  kl 0.125  left 0:00:00" in printed


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


def test_time_left_counts_the_evaluations_and_checkpoints_to_come(lines) -> None:
    clock = Clock()
    progress = make_progress(total=7, now=clock, eval_every=2, checkpoint_every=3)

    def take(phase: str, seconds: float) -> None:
        progress.phase(phase)
        clock.seconds += seconds

    take("evaluation", 30)
    progress.evaluated(0, {})
    for step in range(1, 8):
        take("rollout", 3)
        take("update", 2)
        if step in (2, 4, 6, 7):
            take("evaluation", 20)
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
    for step in (5, 6):
        clock.seconds += 60
        progress.end(step, {})
    assert lines()[-1] == "step 6/10  left 0:04:00 and 2 evaluations"


def test_time_left_follows_a_pace_that_changed(lines) -> None:
    clock = Clock()
    progress = make_progress(total=100, now=clock)
    for step in range(1, 61):
        clock.seconds += 10 if step <= 30 else 2
        progress.end(step, {})
    # The last 20 steps took 2 s each, the mean of all is 6 s.
    assert lines()[-1].startswith("step 60/100  left 0:01:20")


def test_time_left_forgives_a_step_that_was_held_up(lines) -> None:
    clock = Clock()
    progress = make_progress(total=1000, now=clock)
    for step, seconds in enumerate((10, 10, 10, 100, 10), start=1):
        clock.seconds += seconds
        progress.end(step, {})
    # 995 steps of 10 s.
    assert lines()[-1].startswith("step 5/1000  left 2:45:50")


def test_time_left_takes_an_evaluation_for_one_whatever_its_phases(lines) -> None:
    clock = Clock()
    progress = make_progress(total=4, eval_every=2, now=clock)
    for step in (1, 2):
        clock.seconds += 10
        if step == 2:
            progress.phase("evaluation")
            for phase in ("rollout", "decode", "reward"):
                progress.phase(phase)
                clock.seconds += 5
            progress.evaluated(2, {})
        progress.end(step, {})
    # Two steps of 10 s and an evaluation of 15 s.
    assert lines()[-1] == "step 2/4  left 0:00:35"


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


def test_a_line_has_terms_speed_and_memory_of_the_step(lines) -> None:
    make_progress(total=40).end(4, {**STEP, "eval/total": 0.75})

    assert lines() == [
        "step 4/40  reward 0.812  lpips 0.875  ocr 0.500  kl 0.031  clipped 0.000  eval 0.750  "
        "4.25 images/s  15.0 s  1.50 GB"
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_broken_between_figures_where_the_terminal_is_narrow() -> None:
    terminal = Terminal()
    console = Console(file=terminal, force_interactive=True, width=50, color_system=None)
    with make_progress(total=40, console=console) as progress:
        progress.end(4, STEP)

    plain = re.sub(r"\x1b\[[\d;?]*\w", "", terminal.getvalue())
    assert plain[plain.index("step  4") :].splitlines()[:3] == [
        "step  4/40  reward 0.812  lpips 0.875  ocr 0.500",
        "    kl 0.031  clipped 0.000  4.25 images/s  15.0 s",
        "    1.50 GB",
    ]


def test_time_left_is_the_pace_after_the_first_step_times_the_steps_to_come(lines) -> None:
    clock = Clock()
    progress = make_progress(total=10, done=4, now=clock)
    progress.phase("evaluation")
    progress.evaluated(4, {})
    # Steps 6 and 7 took 60 s each, with 3 to come; step 5 with its 500 s does not count.
    for step, seconds in ((5, 500.0), (6, 560.0), (7, 620.0)):
        clock.seconds = seconds
        progress.end(step, {})

    assert lines()[1:] == ["step 5/10  ", "step 6/10  left 0:04:00", "step 7/10  left 0:03:00"]


def test_a_resumed_run_compares_with_the_metrics_it_is_given(lines) -> None:
    progress = make_progress(
        total=40,
        done=20,
        untrained={"step": 0, "eval/total": 0.25, "eval/ocr": None},
    )
    progress.evaluated(30, {"eval/total": 0.75, "eval/ocr": 0.5, "reward/mean": 1.0})

    # OCR had no value at step 0, and the reward is none of the evaluation.
    assert lines() == ["evaluation at step 30  total 0.750 (+0.500)  ocr 0.500"]


def test_terms_without_a_value_are_left_out(lines) -> None:
    progress = make_progress(total=2)
    progress.evaluated(0, {"eval/total": 0.5, "eval/ocr": float("nan")})
    progress.end(1, {"reward/mean": float("nan"), "kl/reference": 0.0})

    assert lines() == ["evaluation at step 0  total 0.500", "step 1/2  kl 0.000"]
