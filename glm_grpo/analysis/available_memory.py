"""How much memory there is for a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Of the container, in the second and the first version of control groups."""


def available_memory(device: torch.device) -> int | None:
    """Bytes where the phases of a run take place.

    Args:
        device: Its own memory, all of it, where it is a CUDA device; that of the machine where it
            is the CPU.

    Returns:
        None where nothing is known of the device.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return cpu_memory() if device.type == "cpu" else None


def cpu_memory(meminfo: Path = _MEMINFO, limits: Iterable[Path] = _CGROUP_LIMITS) -> int | None:
    """Bytes that programs can still take, at most what the container may have.

    Args:
        meminfo: Of Linux; other systems have none.
        limits: Files that hold a limit in bytes, or none.

    Returns:
        None where the system does not say.
    """
    if not meminfo.is_file():
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), flags=re.MULTILINE)
    if found is None:
        return None
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    return min([int(found[1]) * 1024, *(int(text) for text in texts if text.isdigit())])
