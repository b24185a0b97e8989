from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glm_grpo.errors import StorageError
from glm_grpo.run.lock import RunLock
from tests.programs import Program, Programs

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from glm_grpo.run.lock import RunLock
lock = RunLock()
lock.acquire(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(60)
"""


@contextmanager
def held_elsewhere(programs: Programs, path: Path) -> Iterator[tuple[Program, int]]:
    """Another process that holds the lock, and the id of a process it started."""
    program = programs.start(path, "-c", HOLDER, str(path))
    while not program.said().endswith("\n"):
        assert program.wait(0.02) is None
    child = int(program.said())
    try:
        yield program, child
    finally:
        os.kill(child, signal.SIGKILL)
        program.kill()


def acquire(folder: Path) -> RunLock:
    lock = RunLock()
    lock.acquire(folder)
    return lock


def test_acquire_refuses_a_folder_that_another_process_writes_to(
    tmp_path: Path, programs: Programs
) -> None:
    with held_elsewhere(programs, tmp_path) as (holder, _):
        said = rf"{tmp_path} .*process {holder.pid} on {socket.gethostname()}: .*run_dir"
        with pytest.raises(StorageError, match=said):
            acquire(tmp_path)


def test_killed_holder_gives_the_lock_back_though_what_it_started_lives_on(
    tmp_path: Path, programs: Programs
) -> None:
    with held_elsewhere(programs, tmp_path) as (holder, child):
        holder.kill()
        acquire(tmp_path)
        os.kill(child, 0)


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = acquire(tmp_path), RunLock()
    with pytest.raises(StorageError, match=f"process {os.getpid()} on"):
        second.acquire(tmp_path)
    # The refused one has left nothing behind, and gives back nothing that is not its own.
    second.release()
    with pytest.raises(StorageError):
        second.acquire(tmp_path)
    first.release()
    first.release()
    second.acquire(tmp_path)


def test_lock_ends_with_its_object(tmp_path: Path) -> None:
    # As in a sweep, when a run fails before anyone releases it.
    lock = acquire(tmp_path)
    del lock
    gc.collect()
    acquire(tmp_path)


def refuse_locks(code: int) -> Callable[[int, int], None]:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    return flock


def test_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_locks(errno.ENOLCK))
    with caplog.at_level(logging.WARNING):
        acquire(tmp_path)
    assert f" {tmp_path} " in caplog.text


def test_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=rf"nowhere\S*: {os.strerror(errno.ENOENT)}"):
        acquire(tmp_path / "nowhere")
