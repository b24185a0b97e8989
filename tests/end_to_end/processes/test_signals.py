"""SIGINT, once and twice: a run stops after its step and saves, or ends at once."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics

ROOT = Path(__file__).resolve().parents[3]
INTERRUPT = int(signal.SIGINT)
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended where nothing was to be saved."""


def test_one_signal_ends_the_run_after_the_step_at_hand_saved(
    train_server: Any, whole_run: Any, record_of: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "fähl [1] x"
    at = whole_run.number_of("open images/.step-000001")
    run = train_server.start(run_dir, signals={at: INTERRUPT})

    assert run.wait() == 0
    said = run.said()
    assert "SIGINT: the run stops after this step and saves" in said
    resume = re.search("stopped and saved; continue with (.*)", said)
    assert resume is not None
    assert "Traceback" not in said
    assert [row["step"] for row in read_metrics(RunFolder(run_dir))] == [0, 1]
    assert RunFolder(run_dir).checkpoint_dir(1).is_dir()
    train_server.finish(tmp_path / "elsewhere", *shlex.split(resume[1])[2:])
    assert record_of(run_dir) == whole_run.record


def test_second_signal_ends_the_run_at_once(
    train_server: Any, whole_run: Any, run_dir: Path
) -> None:
    # Of the main thread: sent by another, the second could come before the first is heard.
    at = whole_run.number_of("mkdir checkpoints/.step-000001")
    run = train_server.start(run_dir, signals={at: INTERRUPT, at + 1: INTERRUPT})

    assert run.wait() == INTERRUPTED
    assert "Interrupted." in run.said()
    assert "stopped and saved" not in run.said()
    assert "Traceback" not in run.said()
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
