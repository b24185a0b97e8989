"""How much memory a run takes now, so that a leak is seen where the peak only ever grows."""

from __future__ import annotations

import psutil


def process_bytes() -> int:
    """Resident memory of this process and of all that it started, scorers among them.

    Memory that processes share counts once for each. One that ends while it is asked counts 0.
    """
    this = psutil.Process()
    return sum(_resident_bytes(process) for process in (this, *this.children(recursive=True)))


def _resident_bytes(process: psutil.Process) -> int:
    try:
        resident: int = process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    return resident
