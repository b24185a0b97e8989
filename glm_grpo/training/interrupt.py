"""Stop on a signal: the first finishes the step and saves, a later one stops at once.

The signals are Ctrl-C, SIGTERM and SIGHUP, which a closed terminal sends. Before the first step,
Ctrl-C ends the program as usual, by KeyboardInterrupt.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

_SAME_REQUEST_SECONDS = 5.0
"""Slurm signals a launcher and its child processes, and the launcher forwards its signal."""

_interrupts: list[int] = []
"""Ctrl-C before the first step; still not empty later only if some code caught the exception."""


def stop_signals() -> list[signal.Signals]:
    """Signals that ask a run to stop; without SIGHUP under `nohup`, which has it ignored."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT before the first step: remember it and raise KeyboardInterrupt.

    Libraries that try an import may catch it, and Python itself drops exceptions raised in a
    destructor or a callback; `stop_on_signal` ends the program in these cases.
    """
    _interrupts.append(number)
    sys.unraisablehook = _report_unless_interrupt
    signal.default_int_handler(number, frame)


def _report_unless_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


class StopRequest:
    """Whether someone asked the run to stop."""

    def __init__(self) -> None:
        self.is_set = False


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn the first of `stop_signals` into a request; a later one has its usual effect.

    Signals within `_SAME_REQUEST_SECONDS` after it belong to the same request. Signals reach only
    the main thread; in any other thread, the request is never set.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed earlier, and a library swallowed it.
    """
    if _interrupts:
        raise KeyboardInterrupt
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in stop_signals()}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    begun = 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal begun
        if not request.is_set:
            request.is_set, begun = True, time.monotonic()
            logger.warning(
                "%s: the run stops after this step and saves; send it again after %g s to stop at "
                "once",
                signal.Signals(number).name,
                _SAME_REQUEST_SECONDS,
            )
        elif time.monotonic() - begun >= _SAME_REQUEST_SECONDS:
            restore()
            signal.raise_signal(number)

    for number in previous:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        restore()
