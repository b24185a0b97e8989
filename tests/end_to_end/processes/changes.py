"""What is done in a process of a test before it becomes `train.py`."""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.small_preview import shrink_preview


class Changes:
    """Counts the changes of a folder, just before each, and sends this process signals at a count.

    It hears the audit events of Python, which libraries in other languages do not raise: what they
    write, such as safetensors files, falls between the events before and after. Syncing is left
    out, because the system outlives the process and keeps what it was given.

    Args:
        folder: Only what happens in it counts.
        signals: Number of the change, from 0 -> signal.
        log: Where every change is written, a line each.
    """

    def __init__(self, folder: str, signals: dict[int, int], log: str) -> None:
        self._folder = folder
        self._signals = signals
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self._count = 0
        os.fsync = lambda _: None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._note(event, path)
        elif event in ("os.rename", "os.truncate"):
            self._note(event, arguments[0])
        elif event in ("os.remove", "os.rmdir", "os.mkdir"):
            path, folder = arguments[0], arguments[-1]
            if folder != -1:
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
            # Code that asks for forgiveness makes folders that are there, and removes what is not.
            if os.path.lexists(path) == (event != "os.mkdir"):
                self._note(event, path)

    def _note(self, event: str, path: Any) -> None:
        # Trackers and locks may open files by their descriptors.
        if isinstance(path, int) or not os.fspath(path).startswith(self._folder):
            return
        count = self._count
        self._count += 1
        os.write(self._log, f"{event} {os.path.relpath(path, self._folder)}\n".encode())
        if count in self._signals:
            os.kill(os.getpid(), self._signals[count])


def watch(run_dir: str, signals: dict[str, int], log: str) -> None:
    """Counts changes of the run folder, and leaves out what takes time and writes nothing.

    A second signal ends the run however early it comes.
    """
    from glm_grpo.commands import train  # noqa: PLC0415
    from glm_grpo.training import interrupt  # noqa: PLC0415

    train.check_fit = lambda *_: ""
    interrupt._SAME_REQUEST_SECONDS = 0.0
    shrink_preview()
    Changes(run_dir, {int(count): number for count, number in signals.items()}, log)
