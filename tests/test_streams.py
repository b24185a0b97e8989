"""Output that nobody reads any more does not end a program."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from glm_grpo.streams import ignore_broken_pipe


@pytest.fixture
def open_as_stdout(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def open_it(descriptor: int) -> None:
        stream = os.fdopen(descriptor, "w")
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "__stdout__", stream)
        ignore_broken_pipe()

    return open_it


def test_output_goes_on_into_a_pipe_that_is_closed(open_as_stdout: Callable[[int], None]) -> None:
    reading, writing = os.pipe()
    open_as_stdout(writing)
    Console().print("read")
    sys.stdout.flush()
    assert os.read(reading, 99) == b"read\n"
    os.close(reading)
    # rich would end the program.
    Console().print("unread")
    sys.stdout.flush()


def test_output_goes_on_into_a_closed_terminal(open_as_stdout: Callable[[int], None]) -> None:
    terminal, writing = os.openpty()
    open_as_stdout(writing)
    assert sys.stdout.isatty()
    os.close(terminal)
    Console().print("unread")
    sys.stdout.flush()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_output_that_a_full_disk_loses_is_an_error(open_as_stdout: Callable[[int], None]) -> None:
    open_as_stdout(os.open("/dev/full", os.O_WRONLY))
    sys.stdout.write("lost")
    with pytest.raises(OSError, match="No space left"):
        sys.stdout.flush()
    # Nothing is left for the end of the program.
    with pytest.raises(OSError, match="No space left"):
        sys.stdout.close()
