"""A disk that runs full or may not be written: one line, nothing lost, and the run goes on later.

The disk is a small tmpfs. A run stops itself just before a write; the disk is filled meanwhile.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.run.checkpoints import load_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_table

pytestmark = pytest.mark.long

MEBIBYTE = 2**20


class Disk:
    """A small file system, mounted for a test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path))

    def _mount(self, *arguments: str) -> None:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")

    def fill(self, *, but: int) -> None:
        """Leaves so many bytes."""
        state = os.statvfs(self.path)
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize - but)

    def free(self) -> None:
        self._filler.unlink()

    def make_read_only(self) -> None:
        self._mount("-o", "remount,ro", str(self.path))

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.path], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.unmount()


def assert_complete_is_readable(run_dir: Path) -> None:
    """All that has its name can be read, and nothing half written is beside it."""
    folder = RunFolder(run_dir)
    read_metrics(folder)
    for table in (*folder.rollouts_dir.glob("*"), *folder.evaluations_dir.glob("*")):
        read_table(table)
    for checkpoint in folder.checkpoints_dir.glob("*"):
        load_checkpoint(checkpoint)
    assert [path for path in run_dir.rglob("*") if path.name.endswith(".tmp")] == []


def test_full_disk_ends_in_one_line_and_the_run_goes_on_when_there_is_space(
    train_server: Any,
    whole_run: Any,
    record_of: Any,
    disk: Disk,
) -> None:
    run_dir = disk.path / "day" / "run"
    checkpoint = whole_run.number_of("mkdir checkpoints/.step-000002")
    run = train_server.start_until(run_dir, checkpoint)
    # The second of its files does not fit.
    disk.fill(but=9 * MEBIBYTE)

    assert run.proceed() == 1

    last = run.said().splitlines()[-1]
    assert last.startswith(f"StorageError: Cannot write {run_dir}/checkpoints/step-00")
    assert last.endswith("No space left on device. Free some space, then resume the run.")
    assert "Traceback" not in run.said()
    assert_complete_is_readable(run_dir)
    disk.free()
    train_server.finish(run_dir)
    assert record_of(run_dir) == whole_run.record


def test_read_only_folder_is_refused_before_the_model_is_loaded(
    train_server: Any, disk: Disk
) -> None:
    disk.make_read_only()
    run = train_server.start(disk.path / "new")
    assert run.wait() == 1
    last = run.said().splitlines()[-1]
    assert last.startswith("StorageError: ")
    assert "Read-only file system" in last
    assert "run folder: " not in run.said()
