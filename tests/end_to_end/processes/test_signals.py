"""SIGTERM and SIGINT, once and twice, at every stage of a run."""

from __future__ import annotations

import os
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
INTERRUPT, TERMINATE = int(signal.SIGINT), int(signal.SIGTERM)
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended where nothing was to be saved."""


EVALUATION_0 = "rename images/.eval-000000"
STEP_1 = "open images/.step-000001"
TABLE_1 = "rename rollouts/.step-000001"
EVALUATION_2 = "open images/.eval-000002"
NAMES = {INTERRUPT: "SIGINT", TERMINATE: "SIGTERM"}


def steps_of(run_dir: Path) -> list[Any]:
    return [row["step"] for row in read_metrics(RunFolder(run_dir))]


@pytest.mark.parametrize(
    ("place", "steps", "number"),
    [
        (EVALUATION_0, [0], TERMINATE),
        pytest.param(EVALUATION_0, [0], INTERRUPT, marks=pytest.mark.long),
        (STEP_1, [0, 1], INTERRUPT),
        pytest.param(TABLE_1, [0, 1], TERMINATE, marks=pytest.mark.long),
    ],
    ids=["first evaluation TERM", "first evaluation INT", "pictures INT", "table TERM"],
)
def test_one_signal_ends_the_run_after_the_step_at_hand_saved(
    train_server: Any,
    whole_run: Any,
    record_of: Any,
    run_dir: Path,
    place: str,
    steps: list[int],
    number: int,
) -> None:

    run = train_server.start(run_dir, signals={whole_run.number_of(place): number})

    assert run.wait() == 0
    said = run.said()
    assert f"{NAMES[number]}: the run stops after this step and saves; once more to stop" in said
    assert f"stopped and saved; go on with train.resume={run_dir}" in said
    assert "Traceback" not in said
    assert steps_of(run_dir) == steps
    assert RunFolder(run_dir).checkpoint_dir(steps[-1]).is_dir()
    train_server.finish(run_dir)
    assert record_of(run_dir) == whole_run.record


def test_signal_in_the_last_evaluation_lets_the_run_finish(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path
) -> None:
    run = train_server.start(run_dir, signals={whole_run.number_of(EVALUATION_2): TERMINATE})
    assert run.wait() == 0
    assert "held-out prompts, before and after" in run.said()
    assert "stopped and saved" not in run.said()
    assert record_of(run_dir) == whole_run.record


@pytest.mark.parametrize(
    ("place", "first", "second", "code"),
    [
        (EVALUATION_0, INTERRUPT, INTERRUPT, INTERRUPTED),
        pytest.param(EVALUATION_0, TERMINATE, TERMINATE, -TERMINATE, marks=pytest.mark.long),
        (TABLE_1, INTERRUPT, TERMINATE, -TERMINATE),
        pytest.param(*(STEP_1, TERMINATE, INTERRUPT, INTERRUPTED), marks=pytest.mark.long),
    ],
    ids=["evaluation INT INT", "evaluation TERM TERM", "table INT TERM", "pictures TERM INT"],
)
def test_second_signal_ends_the_run_at_once(
    train_server: Any,
    whole_run: Any,
    record_of: Any,
    run_dir: Path,
    place: str,
    first: int,
    second: int,
    code: int,
) -> None:
    at = whole_run.number_of(place)

    run = train_server.start(run_dir, signals={at: first, at + 1: second})

    assert run.wait() == code
    assert "stopped and saved" not in run.said()
    assert "Traceback" not in run.said()
    assert ("Interrupted." in run.said()) == (code == INTERRUPTED)
    # What is half written is removed where there is time for it; nothing else is done.
    after = run.listed_changes()[at + 2 :]
    assert [change for change in after if ".tmp" not in change] == []
    train_server.finish(run_dir)
    assert record_of(run_dir) == whole_run.record


@pytest.mark.parametrize(
    ("number", "code"), [(INTERRUPT, INTERRUPTED), (TERMINATE, -TERMINATE)], ids=["INT", "TERM"]
)
def test_signal_while_the_model_loads_ends_the_run_at_once(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path, number: int, code: int
) -> None:
    run = train_server.start(run_dir)
    while "run folder" not in run.said():
        time.sleep(0.01)
    # The model is loaded next, which takes half a second.
    time.sleep(0.1)
    os.kill(run.pid, number)
    assert run.wait() == code
    assert "Traceback" not in run.said()
    assert ("Interrupted." in run.said()) == (code == INTERRUPTED)
    assert not RunFolder(run_dir).metrics_path.exists()
    train_server.finish(run_dir)
    assert record_of(run_dir) == whole_run.record


@pytest.mark.parametrize(
    ("number", "code"), [(INTERRUPT, INTERRUPTED), (TERMINATE, -TERMINATE)], ids=["INT", "TERM"]
)
def test_signal_while_the_last_page_is_written_ends_the_run(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path, number: int, code: int
) -> None:
    # The loop is over and has given the signals back; the last page is made anew by who goes on.
    run = train_server.start(run_dir, signals={len(whole_run.changes) - 2: number})
    assert run.wait() == code
    assert "Traceback" not in run.said()
    train_server.finish(run_dir)
    assert record_of(run_dir) == whole_run.record


@pytest.mark.parametrize("seconds", [0.6, 1.5, 4.0, 7.0])
def test_interrupt_while_libraries_are_imported_ends_without_a_traceback(
    tmp_path: Path, seconds: float
) -> None:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), f"run_dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell that starts the tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=100)
    assert process.returncode in (-INTERRUPT, INTERRUPTED), said
    assert "Traceback" not in said


SWALLOWING = """
import os, signal

def bright(images, prompts):
    return [0.5] * len(images)

try:
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass
except:
    pass
"""


def test_interrupt_that_a_library_swallows_ends_the_run_before_its_first_step(
    tmp_path: Path,
) -> None:
    (tmp_path / "swallowing.py").write_text(SWALLOWING, encoding="utf-8")
    process = subprocess.run(
        [
            sys.executable,
            str(ROOT / "train.py"),
            f"run_dir={tmp_path / 'run'}",
            "~reward.terms",
            "+reward.terms.bright={kind: custom, function: 'swallowing:bright', weight: 1}",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        timeout=250,
    )
    assert process.returncode == INTERRUPTED, process.stdout
    assert "Interrupted." in process.stdout
    assert "Traceback" not in process.stdout
    assert not RunFolder(tmp_path / "run").metrics_path.exists()
