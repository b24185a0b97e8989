"""The phases of a step: their seconds, and the display that is notified of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Display(Protocol):
    """Receives progress notifications; implemented by the terminal."""

    def phase(self, name: str) -> None:
        """Begin a phase."""
        ...

    def count(self, done: int, total: int) -> None:
        """Report the progress of the current phase: tokens, prompts, scores or micro-batches."""
        ...

    def evaluating(self, done: int, total: int) -> None:
        """Report the number of evaluated held-out prompts; later phases belong to the next ones."""
        ...


class NoDisplay:
    """A display that shows nothing."""

    def phase(self, name: str) -> None:
        """Do nothing."""

    def count(self, done: int, total: int) -> None:
        """Do nothing."""

    def evaluating(self, done: int, total: int) -> None:
        """Do nothing."""


class PhaseClock:
    """Add up wall-clock seconds by phase; waits for the accelerator before reading the time.

    Only waits for the current stream, because reward terms work on their own streams meanwhile.

    Args:
        display: Display to notify when a phase begins; None: no display.
    """

    def __init__(self, display: Display | None = None) -> None:
        self._display = display or NoDisplay()
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        self._display.phase(name)
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def announce(self, name: str) -> None:
        """Notify the display of a phase, without timing it."""
        self._display.phase(name)

    def count(self, done: int, total: int) -> None:
        """Notify the display of the progress in the current phase."""
        self._display.count(done, total)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that a phase took elsewhere; this step need not have waited for them."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, and `step` for the whole time since the clock was created."""
        return {**self._seconds, "step": time.perf_counter() - self._started}
