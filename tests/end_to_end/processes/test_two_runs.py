"""Two runs in one folder: the second is refused. Runs of a sweep have folders of their own."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics


def assert_refused(run: Any, run_dir: Path, holder: int) -> None:
    assert run.wait() == 1, run.said()
    last = run.said().splitlines()[-1]
    host = socket.gethostname()
    assert last.startswith(
        f"StorageError: {run_dir} is being written to by process {holder} on {host}: "
    )
    assert "set run_dir to another folder" in last
    assert "Traceback" not in run.said()


def test_second_run_is_refused_and_changes_nothing(train_server: Any, run_dir: Path) -> None:
    # Once it has a config.
    first = train_server.start_until(run_dir, 4)
    names = sorted(run_dir.rglob("*"))

    assert_refused(train_server.start(run_dir), run_dir, first.pid)

    assert sorted(run_dir.rglob("*")) == names
    first.program.kill()


@pytest.mark.long
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
