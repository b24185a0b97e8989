"""Lock a run folder for one writer; the system releases the lock however its holder ends."""

from __future__ import annotations

import errno
import logging
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import storage_errors

LOCK_NAME = "run.lock"
"""Lock file in the run folder. It remains after the run; only the system's lock on it matters."""

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""Errors of file systems without locks, such as some network file systems."""

_logger = logging.getLogger(__name__)


class RunLock:
    """Exclusive right to write into a run folder.

    It ends with `release`, with this object, or with the process, even a killed one; child
    processes do not inherit it. Two locks on one folder exclude each other within one process, too.
    """

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def acquire(self, folder: Path) -> None:
        """Take the lock of a run folder, or report who holds it; never waits.

        If the file system has no locks, warn and continue.

        Args:
            folder: Run folder; must exist.
        """
        file = folder / LOCK_NAME
        with storage_errors("lock", file):
            folder.stat()  # FileLock would create a missing folder
            # Given a callback, FileLock never falls back to a lock that would outlive a killed
            # holder.
            lock = FileLock(file, thread_local=False, blocking=False, on_acquired=_write_holder)
            try:
                lock.acquire()
            except Timeout as error:
                raise StorageError(
                    f"{folder} is being written to by {_read_holder(file)}: a run folder has one "
                    "writer. Wait for it or stop it, then continue with train.resume; or set "
                    "run_dir to another folder"
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                _logger.warning(
                    "the file system of %s does not support locks (%s): nothing keeps a second run "
                    "out of this folder, so do not start one there",
                    folder,
                    error.strerror,
                )
        self._lock = lock

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._lock is not None:
            self._lock.release()


def _write_holder(descriptor: int) -> None:
    note = f"process {os.getpid()} on {socket.gethostname()}\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, note.encode(), 0)


def _read_holder(file: Path) -> str:
    """Describe the process that holds the lock, as it registered itself."""
    return file.read_text(encoding="utf-8", errors="replace").strip() or "another process"
