"""A run whose newest checkpoint is damaged goes on from the one before it, and says so."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.run.folder import RunFolder

LENGTH = ("train.steps=3", "train.keep_checkpoints=2")


@pytest.fixture(scope="module")
def two_saved(train_server: Any, tmp_path_factory: Any) -> Path:
    """A killed run with two checkpoints; the undisturbed one is in `watched` beside it."""
    folder = tmp_path_factory.mktemp("saved")
    watched = train_server.finish(folder / "watched" / "day" / "run", *LENGTH)
    number = watched.number_of("images/.step-000003")
    run_dir = folder / "killed" / "day" / "run"
    killed = train_server.start(run_dir, *LENGTH, signals={number: signal.SIGKILL})
    assert killed.wait() == -signal.SIGKILL, killed.said()
    names = sorted(path.name for path in RunFolder(run_dir).checkpoints_dir.iterdir())
    assert names == ["step-000001", "step-000002"]
    return run_dir


@pytest.fixture(scope="module")
def expected(two_saved: Path, record_of: Any) -> dict[str, Any]:
    """What the undisturbed run left."""
    return record_of(two_saved.parents[2] / "watched" / "day" / "run")


@pytest.fixture
def run_dir(two_saved: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(two_saved, tmp_path / "day" / "run"))


def truncate(file: Path) -> None:
    os.truncate(file, int(file.stat().st_size * 0.7))


def files_of(run_dir: Path) -> dict[str, str]:
    """Content of all files but the lock, which says who came last."""
    return {
        str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run_dir.rglob("*")
        if path.is_file() and path.name != "run.lock"
    }


def test_damaged_checkpoint_is_named_and_the_one_before_it_used(
    train_server: Any,
    run_dir: Path,
    expected: dict[str, Any],
    record_of: Any,
) -> None:
    newest = RunFolder(run_dir).checkpoint_dir(2)
    truncate(newest / "policy.safetensors")

    run = train_server.start(run_dir, *LENGTH)

    assert run.wait() == 0, run.said()
    assert f"Skipping a damaged checkpoint. {newest / 'policy.safetensors'} " in run.said()
    assert f"going on with {run_dir} from step-000001" in run.said()
    assert record_of(run_dir) == expected


def test_run_whose_checkpoints_are_all_damaged_is_refused_and_keeps_its_records(
    train_server: Any, run_dir: Path
) -> None:
    folder = RunFolder(run_dir)
    truncate(folder.checkpoint_dir(1) / "policy.safetensors")
    (folder.checkpoint_dir(2) / "checkpoint.json").unlink()
    before = files_of(run_dir)

    run = train_server.start(run_dir, *LENGTH)

    assert run.wait() == 2, run.said()
    last = run.said().splitlines()[-1]
    assert last.startswith("CheckpointError: ")
    assert "is whole" in last
    assert "Traceback" not in run.said()
    assert files_of(run_dir) == before
