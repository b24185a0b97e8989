"""Memory that this process uses."""

from __future__ import annotations

import resource
import sys

import psutil
import torch


def peak_memory_bytes() -> int:
    """Peak accelerator memory since the step began; without one, the process's since its start."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, but bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024


def process_bytes() -> int:
    """Resident memory of this process and its child processes, including scorers.

    It reveals leaks, which a peak that only grows does not. Memory shared by processes counts once
    for each. A process that ends during the query counts 0.
    """
    this = psutil.Process()
    return sum(_resident_bytes(process) for process in (this, *this.children(recursive=True)))


def _resident_bytes(process: psutil.Process) -> int:
    try:
        resident: int = process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    return resident
