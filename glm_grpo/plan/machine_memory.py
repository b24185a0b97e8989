"""Read how much memory a machine has."""

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
"""Files with the container's memory limit, in versions 2 and 1 of control groups."""


def available_memory(device: torch.device) -> int | None:
    """Memory in bytes of the device on which the phases run.

    Args:
        device: A CUDA device, whose total memory counts, or the CPU, for which it is the machine's
            memory.

    Returns:
        Bytes; None for other devices.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return cpu_memory() if device.type == "cpu" else None


def cpu_memory(meminfo: Path = _MEMINFO, limits: Iterable[Path] = _CGROUP_LIMITS) -> int | None:
    """Bytes that programs can still allocate, limited by the container.

    Args:
        meminfo: Linux's memory information file; other systems have none.
        limits: Files that contain a limit in bytes, or do not exist.

    Returns:
        Bytes; None if the system does not report them.
    """
    if not meminfo.is_file():
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), flags=re.MULTILINE)
    if found is None:
        return None
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    return min([int(found[1]) * 1024, *(int(text) for text in texts if text.isdigit())])
