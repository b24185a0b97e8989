"""A disk that is full, or read-only, at every kind of write: one line, nothing lost, and going on.

The disk is a small tmpfs. A run stops itself just before a write; the disk is filled meanwhile.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_table
from glm_grpo.training.checkpoint.files import load_checkpoint

MEBIBYTE = 2**20
FULL = "No space left on device. Free some space, then resume the run."
READ_ONLY = "Read-only file system. Choose an output folder on a file system that can be written."


class Disk:
    """A small file system, mounted for a test."""

    def __init__(self, path: Path, size: str) -> None:
        self.path = path
        self._filler = path / "filler"
        path.mkdir(parents=True, exist_ok=True)
        self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))

    def _mount(self, *arguments: str) -> None:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")

    def fill(self, *, but: int = 0) -> None:
        """Leaves so many bytes."""
        state = os.statvfs(self.path)
        size = state.f_bavail * state.f_frsize - but
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def free(self) -> None:
        self._filler.unlink()

    def make_read_only(self, is_read_only: bool) -> None:
        self._mount("-o", f"remount,{'ro' if is_read_only else 'rw'}", str(self.path))

    def hold_elsewhere(self, file: Path, place: Path) -> None:
        """Puts a file of this disk on another: one that is open for writing keeps it writable."""
        for each in (file, place):
            each.parent.mkdir(parents=True, exist_ok=True)
            each.touch()
        self._mount("--bind", str(place), str(file))

    def unmount(self) -> None:
        subprocess.run(["umount", "--recursive", "--lazy", self.path], check=True)


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Any]:
    """Mounts file systems below a path, which needs root."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    disks = []

    def make(path: Path, size: str) -> Disk:
        disks.append(Disk(path, size))
        return disks[-1]

    yield make
    for disk in reversed(disks):
        disk.unmount()


@pytest.fixture
def disk(make_disk: Any, tmp_path: Path) -> Disk:
    return make_disk(tmp_path / "disk", "64m")


def assert_complete_is_readable(run_dir: Path) -> None:
    """All that has its name can be read, and nothing half written is beside it."""
    folder = RunFolder(run_dir)
    read_metrics(folder)
    for table in (*folder.rollouts_dir.glob("*"), *folder.evaluations_dir.glob("*")):
        read_table(table)
    for checkpoint in folder.checkpoints_dir.glob("*"):
        load_checkpoint(checkpoint)
    assert [path for path in run_dir.rglob("*") if path.name.endswith(".tmp")] == []


@pytest.mark.parametrize(
    ("change", "occurrence", "left", "said"),
    [
        ("open .config.yaml", 1, 0, "Cannot write {}/config.yaml: "),
        ("open images/.step-000002", 2, 0, "Cannot write {}/images/step-000002: "),
        pytest.param(
            *("open rollouts/.step-000002", 1, 0),
            "Cannot write {}/rollouts/step-000002.parquet: ",
            marks=pytest.mark.long,
        ),
        ("open metrics.jsonl", 1, 0, "Cannot append to {}/metrics.jsonl: "),
        pytest.param(
            *("open .metrics.jsonl", 1, 0),
            "Cannot write {}/metrics.jsonl: ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("open gallery/thumbs/step-000002", 1, 0),
            "Cannot write {}/gallery/thumbs/step-000002/p",
            marks=pytest.mark.long,
        ),
        ("open gallery/data/.run.js", 2, 0, "Cannot write {}/gallery/data/run.js: "),
        pytest.param(
            *("open gallery/.report.html", 3, 0),
            "Cannot write {}/gallery/report.html: ",
            marks=pytest.mark.long,
        ),
        # Within its first file, its second one, and its manifest.
        pytest.param(
            *("mkdir checkpoints/.step-000002", 1, MEBIBYTE),
            "Cannot write {}/checkpoints/step-000002: ",
            marks=pytest.mark.long,
        ),
        (
            "mkdir checkpoints/.step-000002",
            1,
            9 * MEBIBYTE,
            "Cannot write {}/checkpoints/step-000002: ",
        ),
        ("step-000002.tmp/checkpoint.json", 1, 0, "Cannot write {}/checkpoints/step-000002: "),
    ],
)
def test_full_disk_ends_in_one_line_and_the_run_goes_on_when_there_is_space(
    train_server: Any,
    whole_run: Any,
    record_of: Any,
    disk: Disk,
    change: str,
    occurrence: int,
    left: int,
    said: str,
) -> None:
    run_dir = disk.path / "day" / "run"
    run = train_server.start_until(run_dir, whole_run.number_of(change, occurrence))
    disk.fill(but=left)

    assert run.proceed() == 1

    last = run.said().splitlines()[-1]
    assert re.match(f"StorageError: {re.escape(said.format(run_dir))}.*", last)
    assert last.endswith(FULL)
    assert "Traceback" not in run.said()
    assert_complete_is_readable(run_dir)
    disk.free()
    train_server.finish(run_dir)
    assert record_of(run_dir) == whole_run.record


def test_disk_that_is_full_from_the_start_is_said(train_server: Any, disk: Disk) -> None:
    (disk.path / "run").mkdir()
    disk.fill()
    run = train_server.start(disk.path / "run")
    assert run.wait() == 1
    assert run.said().splitlines()[-1].endswith(FULL)
    assert "Traceback" not in run.said()


def test_tracker_whose_disk_is_full_stops_no_run(
    train_server: Any, whole_run: Any, record_of: Any, make_disk: Any, tmp_path: Path
) -> None:
    # Its own disk: everything else can be written.
    run_dir = tmp_path / "day" / "run"
    make_disk(run_dir / "tensorboard", "16k")
    run = train_server.start(run_dir, "trackers=[tensorboard]")
    assert run.wait() == 0, run.said()
    assert run.said().count("Tracker tensorboard failed (") == 1
    assert "training goes on, metrics.jsonl is complete" in run.said()
    assert "Traceback" not in run.said()
    record = record_of(run_dir)
    assert record["step 2"] == whole_run.record["step 2"]


def test_full_disk_with_a_tracker_ends_in_one_line(
    train_server: Any, whole_run: Any, disk: Disk
) -> None:
    run_dir = disk.path / "day" / "run"
    watched = train_server.finish(run_dir, "trackers=[tensorboard]")
    number = watched.number_of("open rollouts/.step-000002")
    shutil.rmtree(run_dir.parent)
    run = train_server.start_until(run_dir, number, "trackers=[tensorboard]")
    disk.fill()
    assert run.proceed() == 1
    assert "Traceback" not in run.said()
    last = run.said().splitlines()[-1]
    assert last == f"StorageError: Cannot write {run_dir}/rollouts/step-000002.parquet: {FULL}"


def test_read_only_folder_is_refused_before_the_model_is_loaded(
    train_server: Any, disk: Disk
) -> None:
    (disk.path / "run").mkdir()
    disk.make_read_only(True)
    for run_dir in (disk.path / "run", disk.path / "new"):
        started = time.monotonic()
        run = train_server.start(run_dir)
        assert run.wait() == 1
        assert time.monotonic() - started < 60
        last = run.said().splitlines()[-1]
        assert last.startswith("StorageError: ")
        assert os.strerror(errno.EROFS) in last
        assert "Traceback" not in run.said()
        assert "run folder: " not in run.said()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            "open images/.step-000002",
            "Cannot write {}/images/step-000002: ",
            marks=pytest.mark.long,
        ),
        ("open metrics.jsonl", "Cannot append to {}/metrics.jsonl: "),
        ("mkdir checkpoints/.step-000002", "Cannot write {}/checkpoints/step-000002: "),
    ],
)
def test_folder_that_becomes_read_only_ends_in_one_line_and_the_run_goes_on_later(
    train_server: Any,
    whole_run: Any,
    record_of: Any,
    disk: Disk,
    tmp_path: Path,
    change: str,
    said: str,
) -> None:
    run_dir = disk.path / "day" / "run"
    disk.hold_elsewhere(run_dir / "run.lock", tmp_path / "run.lock")
    # The folder is there already, and so is the lock, which filelock then opens a second time.
    number = whole_run.number_of(change) - whole_run.changes.count("os.mkdir .") + 1
    run = train_server.start_until(run_dir, number)
    disk.make_read_only(True)

    assert run.proceed() == 1

    last = run.said().splitlines()[-1]
    assert last == f"StorageError: {said.format(run_dir)}{READ_ONLY}"
    assert "Traceback" not in run.said()
    disk.make_read_only(False)
    train_server.finish(run_dir)
    assert record_of(run_dir) == whole_run.record
