"""`kill -9` at any moment of a run: it goes on from a whole checkpoint and ends as if undisturbed.

Runs are killed just before a change of their folder, by its number.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.run.checkpoints import load_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics

KILL = int(signal.SIGKILL)

Record = dict[str, Any]


def is_worth_a_kill(number: int, changes: list[str]) -> bool:
    """The many files of the page's program are one after another: the first and last will do."""
    is_asset = [" gallery/assets/" in change for change in changes]
    inside = (
        is_asset[number - 1] and is_asset[number] and is_asset[min(number + 1, len(changes) - 1)]
    )
    return number == 0 or not inside


def assert_killed_whole(run_dir: Path) -> None:
    """Every checkpoint with a name is whole, and no more than the step at hand is lost."""
    folder = RunFolder(run_dir)
    recorded = [int(row["step"] or 0) for row in read_metrics(folder)]
    saved = [load_checkpoint(path).step for path in folder.checkpoints_dir.glob("step-*")]
    assert max(saved, default=0) >= max(recorded, default=0) - 1


def assert_goes_on(train_server: Any, run_dir: Path, expected: Record, record_of: Any) -> None:
    run = train_server.finish(run_dir)
    assert "damaged" not in run.said()
    assert record_of(run_dir) == expected


def kill_before(train_server: Any, number: int, run_dir: Path) -> None:
    """A run that kills itself just before the change of that number."""
    run = train_server.start(run_dir, signals={number: KILL})
    assert run.wait() == -KILL, run.said()
    assert len(run.listed_changes()) == number + 1


def kill_and_compare(
    train_server: Any, number: int, run_dir: Path, expected: Record, record_of: Any
) -> None:
    kill_before(train_server, number, run_dir)
    assert_killed_whole(run_dir)
    assert_goes_on(train_server, run_dir, expected, record_of)
    # To make the folder is a change, too.
    shutil.rmtree(run_dir.parent)


@pytest.mark.parametrize(
    "change",
    [
        "open rollouts/.step-000002",
        "open checkpoints/.step-000002.tmp/checkpoint.json",
        "rename checkpoints/.step-000002",
    ],
)
def test_run_killed_before_a_change_goes_on_to_equal_results(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path, change: str
) -> None:
    number = whole_run.number_of(change)
    kill_and_compare(train_server, number, run_dir, whole_run.record, record_of)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_run_killed_before_every_change_goes_on_to_equal_results(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path
) -> None:
    changes = whole_run.changes
    numbers = [number for number in range(len(changes)) if is_worth_a_kill(number, changes)]
    for number in numbers:
        print(f"{number}/{len(changes)} {changes[number]}", flush=True)  # noqa: T201
        kill_and_compare(train_server, number, run_dir, whole_run.record, record_of)


@pytest.fixture(scope="module")
def half_recorded(train_server: Any, whole_run: Any, tmp_path_factory: Any) -> Path:
    """A run killed as it saved step 2: all of that step is recorded, and is to be made anew."""
    run_dir = tmp_path_factory.mktemp("half") / "day" / "run"
    number = whole_run.number_of("checkpoints/.step-000002.tmp/checkpoint.json")
    kill_before(train_server, number, run_dir)
    return run_dir


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_resumed_run_killed_before_every_change_goes_on_to_equal_results(
    train_server: Any, whole_run: Any, half_recorded: Path, record_of: Any, run_dir: Path
) -> None:
    shutil.copytree(half_recorded, run_dir)
    resumed = train_server.finish(run_dir)
    changes = resumed.listed_changes()
    # From then on it is as in the run that was never interrupted.
    end = resumed.number_of("open images/.step-000002")
    for number in range(end):
        print(f"{number}/{end} {changes[number]}", flush=True)  # noqa: T201
        shutil.rmtree(run_dir)
        shutil.copytree(half_recorded, run_dir)
        kill_before(train_server, number, run_dir)
        assert_killed_whole(run_dir)
        assert_goes_on(train_server, run_dir, whole_run.record, record_of)
