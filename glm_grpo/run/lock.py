"""One writer for a run folder: a lock that the system takes back however its holder ends."""

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
"""File of the run folder. It stays there when the run ends: it is held, or not, by the system."""

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""What file systems say that know no locks, some network ones among them."""

_logger = logging.getLogger(__name__)


class RunLock:
    """The right to write into a run folder, of one process at a time.

    It ends with `release`, with this object, or with the process, a killed one included; programs
    that it starts do not inherit it. Two locks of one process on one folder exclude each other.
    """

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def acquire(self, folder: Path) -> None:
        """Takes the lock of a run folder, or says who has it; never waits.

        Where the file system knows no locks, warns and goes on.

        Args:
            folder: Must exist.

        Raises:
            StorageError: Another run writes into the folder, or it cannot be written.
        """
        file = folder / LOCK_NAME
        with storage_errors("lock", file):
            folder.stat()  # FileLock would make a folder that is not there
            # With a callback FileLock never turns to a lock that would outlive a killed holder.
            lock = FileLock(file, thread_local=False, blocking=False, on_acquired=_write_holder)
            try:
                lock.acquire()
            except Timeout as error:
                raise StorageError(
                    f"{folder} is being written to by {_read_holder(file)}: a run folder has one "
                    "writer. Wait for it or stop it, then go on with train.resume; or set run_dir "
                    "to another folder"
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                _logger.warning(
                    "the file system of %s knows no locks (%s): nothing keeps a second run out of "
                    "it, so start none there",
                    folder,
                    error.strerror,
                )
        self._lock = lock

    def release(self) -> None:
        """Gives the lock back; nothing happens where it is not held."""
        if self._lock is not None:
            self._lock.release()


def _write_holder(descriptor: int) -> None:
    note = f"process {os.getpid()} on {socket.gethostname()}\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, note.encode(), 0)


def _read_holder(file: Path) -> str:
    """The process that holds the lock, as it wrote itself down."""
    return file.read_text(encoding="utf-8", errors="replace").strip() or "another process"
