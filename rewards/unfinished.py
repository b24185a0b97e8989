"""Let terms that are computing finish before Python ends.

Python ends a daemon's thread as soon as it returns from a library. Under torch's C++ code that
aborts the process, with exit code 134 instead of its own.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_SECONDS = 15.0
"""Longest wait. Before, `glm-grpo` ends without Python's own end, because a term may hang."""

_unfinished: set[threading.Event] = set()
_is_ending = False
_lock = threading.Lock()
"""Held while any of the above is read or changed."""


@contextmanager
def finished_before_exit() -> Iterator[None]:
    """Let the process end only after what is inside, or before it began."""
    done = threading.Event()
    with _lock:
        if not _is_ending:
            _unfinished.add(done)
    if done not in _unfinished:
        done.wait()  # which nothing sets
    try:
        yield
    finally:
        with _lock:
            _unfinished.discard(done)
        done.set()


def _wait() -> None:
    global _is_ending
    with _lock:
        _is_ending = True
        waiting = list(_unfinished)
    end = time.monotonic() + _PATIENCE_SECONDS
    for done in waiting:
        done.wait(max(0.0, end - time.monotonic()))


atexit.register(_wait)
