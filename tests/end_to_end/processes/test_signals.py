"""SIGTERM, SIGINT and SIGHUP, once and twice, at every stage of a run."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics

ROOT = Path(__file__).resolve().parents[3]
INTERRUPT, TERMINATE, HANG_UP = int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGHUP)
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended where nothing was to be saved."""


EVALUATION_0 = "rename images/.eval-000000"
STEP_1 = "open images/.step-000001"
NAMES = {INTERRUPT: "SIGINT", TERMINATE: "SIGTERM", HANG_UP: "SIGHUP"}


def steps_of(run_dir: Path) -> list[Any]:
    return [row["step"] for row in read_metrics(RunFolder(run_dir))]


@pytest.mark.parametrize(
    ("place", "steps", "number"),
    [
        pytest.param(EVALUATION_0, [0], TERMINATE, marks=pytest.mark.long),
        (STEP_1, [0, 1], INTERRUPT),
        (STEP_1, [0, 1], HANG_UP),
    ],
    ids=["first evaluation", "step 1", "closed terminal"],
)
def test_one_signal_ends_the_run_after_the_step_at_hand_saved(
    train_server: Any,
    whole_run: Any,
    record_of: Any,
    tmp_path: Path,
    place: str,
    steps: list[int],
    number: int,
) -> None:
    run_dir = tmp_path / "fähl [1] x"
    run = train_server.start(run_dir, signals={whole_run.number_of(place): number})

    assert run.wait() == 0
    said = run.said()
    assert f"{NAMES[number]}: the run stops after this step and saves; send it again after" in said
    resume = re.search("stopped and saved; continue with (.*)", said)
    assert resume is not None
    assert "Traceback" not in said
    assert steps_of(run_dir) == steps
    assert RunFolder(run_dir).checkpoint_dir(steps[-1]).is_dir()
    train_server.finish(tmp_path / "elsewhere", *shlex.split(resume[1])[2:])
    assert record_of(run_dir) == whole_run.record


def test_second_signal_ends_the_run_at_once(
    train_server: Any,
    whole_run: Any,
    run_dir: Path,
) -> None:
    # Of the main thread: sent by another, the second could come before the first is heard.
    at = whole_run.number_of("mkdir checkpoints/.step-000001")

    run = train_server.start(run_dir, signals={at: INTERRUPT, at + 1: INTERRUPT})

    assert run.wait() == INTERRUPTED
    assert "stopped and saved" not in run.said()
    assert "Traceback" not in run.said()
    assert "Interrupted." in run.said()
    # What is half written is removed where there is time for it; nothing else is done.
    after = run.listed_changes()[at + 2 :]
    assert [change for change in after if ".tmp" not in change] == []


def test_interrupt_while_libraries_are_imported_ends_without_a_traceback(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), f"run_dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell that starts the tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=100)
    assert process.returncode in (-INTERRUPT, INTERRUPTED), said
    assert "Traceback" not in said
