"""Keep a program running after the reader of its output is gone."""

from __future__ import annotations

import errno
import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def ignore_broken_pipe() -> None:
    """Let stdout and stderr drop what nobody can read: `| head` has ended, the terminal is closed.

    Otherwise the next line of a log would end a run, or the last one change its exit code. Other
    errors, such as a full disk, are raised as before. Streams that something replaced are kept.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout = _ignoring_broken_pipe(sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = _ignoring_broken_pipe(sys.stderr)


def _ignoring_broken_pipe(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    raw = _IgnoringBrokenPipe(stream.fileno())
    return io.TextIOWrapper(
        # `python -u` writes without a buffer.
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _IgnoringBrokenPipe(io.FileIO):
    """An open descriptor, to which writing never fails for want of a reader."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._is_terminal = self.isatty()

    def write(self, data: ReadableBuffer, /) -> int:
        """Write some bytes, or drop them all."""
        try:
            return super().write(data)
        except OSError as error:
            # A closed terminal fails like a broken disk.
            is_hung_up = error.errno == errno.EIO and self._is_terminal
            if error.errno == errno.EPIPE or is_hung_up:
                return memoryview(data).nbytes
            raise
