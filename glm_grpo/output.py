"""Output of a program: what nobody takes is dropped, what steers a terminal is spelt out.

Imports nothing heavy: a help text is printed by it.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, TextIO

from glm_grpo.errors import StorageError

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What moves the cursor, colours, renames a terminal's window, or turns the direction of a line."""

_READER_GONE = 128 + 13
"""Exit code of a program that SIGPIPE ended, by the convention of POSIX shells: a script sees what
it would see of `cat`."""

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


def without_folders(path: str) -> str:
    """A hub id as it is; of a path the last part, which says nothing of the machine it was on."""
    is_path = os.path.isabs(path) or os.path.exists(path)
    return PurePath(path).name if is_path else path


def describe_bytes(number: int) -> str:
    """In the largest decimal unit that leaves a digit before the point, with two after it."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"


def printable(text: str) -> str:
    """A text of someone else's for the terminal: characters that steer it are spelt out.

    Line breaks and tabs stay.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def guard_output(*, is_run: bool) -> None:
    """Make stdout and stderr of this process such that no write to them fails as a defect.

    Messages that stderr does not take are dropped. What stdout does not take ends a command, whose
    result it is: quietly where the reader is gone, else with a message. It never ends a run. A
    character that the encoding lacks is spelt out. Streams that someone replaced are left alone.

    Args:
        is_run: Whether the program goes on when nobody takes its output.
    """
    if sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(sys.stderr, 2, _dropped)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(sys.stdout, 1, _run_goes_on if is_run else _command_ends)


class _GuardedFile(io.FileIO):
    """A descriptor that leads nowhere from the first write on that fails."""

    def __init__(self, descriptor: int, lost: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lost = lost

    def write(self, content: Any) -> int:
        """All of it, or nothing more for ever."""
        try:
            return super().write(content)
        except OSError as error:
            # Of the whole process: libraries that hold the descriptor are quiet from now on too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            self._lost(error)
            return len(memoryview(content).cast("B"))


def _guarded(stream: TextIO | None, descriptor: int, lost: Callable[[OSError], None]) -> TextIO:
    if stream is None:
        # Closed by the program that started this one; the next file opened must not take its place.
        while (nowhere := os.open(os.devnull, os.O_RDWR)) < descriptor:
            pass
        return os.fdopen(nowhere, "w", encoding="utf-8", errors="backslashreplace")
    stream.flush()
    file = _GuardedFile(descriptor, lost)
    is_unbuffered = isinstance(stream, io.TextIOWrapper) and stream.write_through
    return io.TextIOWrapper(
        # As Python does for -u.
        file if is_unbuffered else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=bool(stream.line_buffering),
        write_through=is_unbuffered,
    )


def _dropped(_: OSError) -> None:
    pass


def _run_goes_on(error: OSError) -> None:
    sys.stderr.write(
        f"standard output takes no more ({error.strerror}): the run goes on, and what it would "
        "print is dropped; its folder has its metrics and its gallery\n"
    )


def _command_ends(error: OSError) -> None:
    if error.errno == errno.EPIPE:
        raise SystemExit(_READER_GONE)
    lost = StorageError(f"standard output cannot be written: {error.strerror}; send it elsewhere")
    sys.stderr.write(f"{type(lost).__name__}: {lost}\n")
    raise SystemExit(lost.exit_code)
