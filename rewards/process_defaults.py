"""Undo what a user's program changes for the whole process, such as torch's default dtype.

Random generators stay as the program leaves them: nothing else draws from the global ones.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

_logger = logging.getLogger(__name__)

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def _set_default_device(device: torch.device) -> None:
    # None is the CPU without a mode that every function of torch would pass through.
    torch.set_default_device(None if device.type == "cpu" else device)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed, which is no concern of a run that writes elsewhere
        return "(removed)"


def _change_folder(folder: str) -> None:
    with suppress(OSError):
        os.chdir(folder)


_OF_PROCESS: Mapping[str, _Setting] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "os.getcwd()": (_working_folder, _change_folder),
}
_OF_THREAD: Mapping[str, _Setting] = {
    "torch.get_default_device()": (torch.get_default_device, _set_default_device),
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
}


class ProcessDefaults:
    """Defaults of the process, as they are when this is created."""

    def __init__(self, settings: Mapping[str, _Setting] = _OF_PROCESS) -> None:
        self._settings = settings
        self._values = {name: read() for name, (read, _) in settings.items()}

    def restore(self, by: str) -> None:
        """Undo changes, and say so in a warning.

        Args:
            by: What made them.
        """
        changes = []
        for name, (read, write) in self._settings.items():
            before, after = self._values[name], read()
            if after != before:
                write(before)
                changes.append(f"{name} from {before} to {after}")
        if changes:
            _warn(
                f"{by} changed {', '.join(changes)}, for the whole process; this was undone. "
                "Change such defaults only around the lines that need them"
            )


@contextmanager
def defaults_kept(by: str) -> Iterator[None]:
    """Undo what is changed inside, also for this thread; see `ProcessDefaults.restore`."""
    defaults = ProcessDefaults({**_OF_PROCESS, **_OF_THREAD})
    try:
        yield
    finally:
        defaults.restore(by)


@functools.cache
def _warn(line: str) -> None:
    """Warn once, even if it happens at every step."""
    _logger.warning("%s", line)
