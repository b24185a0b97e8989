"""Seconds spent in each phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class PhaseClock:
    """Adds up wall-clock seconds by phase; waits for the accelerator before reading the time.

    Args:
        announce: Told the name of every phase as it begins.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what runs inside."""
        self._announce(name)
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def announce(self, name: str) -> None:
        """Tells what begins, and times nothing."""
        self._announce(name)

    def add(self, name: str, seconds: float) -> None:
        """Counts seconds that a phase took elsewhere, of which this step may have waited none."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, and `step` for all the time since the clock was made."""
        return {**self._seconds, "step": time.perf_counter() - self._started}
