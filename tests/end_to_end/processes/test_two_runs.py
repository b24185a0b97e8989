"""Two runs in one folder: the second is refused, and the first one does not notice."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics

KILL = int(signal.SIGKILL)
NEW = "train.resume=null"


def assert_refused(run: Any, run_dir: Path, holder: int) -> None:
    assert run.wait() == 1, run.said()
    last = run.said().splitlines()[-1]
    host = socket.gethostname()
    assert last.startswith(
        f"StorageError: {run_dir} is being written to by process {holder} on {host}: "
    )
    assert "set run_dir to another folder" in last
    assert "Traceback" not in run.said()


@pytest.mark.parametrize("change", ["open .config.yaml", "open images/.step-000002"])
@pytest.mark.parametrize("resume", [NEW, "train.resume=auto"])
def test_second_run_is_refused_and_changes_nothing(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path, change: str, resume: str
) -> None:
    # Before there is a config, and with a checkpoint that the second would go on from.
    first = train_server.start_until(run_dir, whole_run.number_of(change))

    second = train_server.start(run_dir, resume, "train.seed=1")

    if change == "open .config.yaml":
        assert_refused(second, run_dir, first.pid)
    else:
        # It would be refused anyway: for its other seed, or because there is a run already.
        assert second.wait() in (1, 2)
        assert "Traceback" not in second.said()
        third = train_server.start(run_dir)
        assert_refused(third, run_dir, first.pid)
    assert first.proceed() == 0, first.said()
    assert record_of(run_dir) == whole_run.record


def test_two_that_go_on_at_once_are_told_apart(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path
) -> None:
    number = whole_run.number_of("open images/.step-000002")
    killed = train_server.start(run_dir, signals={number: KILL})
    assert killed.wait() == -KILL

    runs = [train_server.start(run_dir, f"train.resume={run_dir}") for _ in range(2)]

    for run in runs:
        run.wait()
    winner, loser = sorted(runs, key=lambda run: run.code)
    assert winner.code == 0, winner.said()
    assert_refused(loser, run_dir, winner.pid)
    assert record_of(run_dir) == whole_run.record


def test_auto_of_a_later_day_does_not_take_a_run_that_goes_on(
    train_server: Any, whole_run: Any, record_of: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "2026-01-01" / "10-00-00"
    first = train_server.start_until(run_dir, whole_run.number_of("open images/.step-000002"))
    later = tmp_path / "2026-01-02" / "10-00-00"
    second = train_server.start(later)
    assert_refused(second, run_dir, first.pid)
    assert not later.exists()
    assert first.proceed() == 0, first.said()
    assert record_of(run_dir) == whole_run.record


def test_killed_run_holds_its_folder_no_longer(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path
) -> None:
    first = train_server.start_until(run_dir, whole_run.number_of("open rollouts/.step-000001"))
    os.kill(first.pid, KILL)
    assert first.wait() == -KILL
    second = train_server.start(run_dir)
    assert second.wait() == 0, second.said()
    assert record_of(run_dir) == whole_run.record


def test_runs_of_a_sweep_have_folders_of_their_own(train_server: Any, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    run = train_server.start(
        sweep,
        "-m",
        "train.seed=0,1",
        f"hydra.sweep.dir={sweep}",
        "run_dir=${hydra:sweep.dir}/${hydra:job.num}",
    )
    assert run.wait() == 0, run.said()
    for number in range(2):
        rows = read_metrics(RunFolder(sweep / str(number)))
        assert [row["step"] for row in rows] == [0, 1, 2]
