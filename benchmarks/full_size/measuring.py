"""Seconds, peaks of memory by phase, and what the device can do at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from glm_grpo.plan.devices import DEVICES, DeviceSpeed
from glm_grpo.training.phase import PhaseClock

_PROCESS = Path("/proc/self")
_COPIED = {"cuda": 2**31, "cpu": 2**27}
"""Bytes; many times the caches."""

_SIDE = {"cuda": 8192, "cpu": 1024}
"""Of the square matrices that are multiplied."""

_REPEATS = 3


class Meter(Protocol):
    """Of memory."""

    def reset(self) -> None:
        """From here on."""
        ...

    def peak(self) -> int:
        """Most bytes since then."""
        ...


class DeviceMeter:
    """What tensors take on the accelerator; the driver's share is not in it."""

    def reset(self) -> None:
        """From here on."""
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Most bytes since then."""
        return torch.cuda.max_memory_allocated()


class ProcessMeter:
    """What the process takes more than when the meter was made (Linux)."""

    def __init__(self) -> None:
        self._before = self._read("VmRSS")

    def reset(self) -> None:
        """From here on."""
        # Documented in proc(5): 5 sets the peak back to what is resident now.
        (_PROCESS / "clear_refs").write_text("5")

    def peak(self) -> int:
        """Most bytes since then."""
        return self._read("VmHWM") - self._before

    def _read(self, key: str) -> int:
        lines = (_PROCESS / "status").read_text().splitlines()
        line = next(line for line in lines if line.startswith(f"{key}:"))
        return int(line.split()[1]) * 1024


class PeakClock(PhaseClock):
    """A phase clock that also takes the peak of every phase.

    Args:
        meter: Of the memory in which the phases run.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self.begun = ""
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what runs inside; the models it needs are there already."""
        self.begun = name
        self._meter.reset()
        with super().phase(name):
            yield
        self.peaks[name] = max(self.peaks.get(name, 0), self._meter.peak())


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int = 1) -> float:
    """Of the fastest of some runs, until the device is done."""
    fastest = float("inf")
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def speed_of(device: torch.device) -> tuple[DeviceSpeed, bool]:
    """What the device can do, and whether that is published; else it is measured here."""
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    for key, speed in DEVICES.items():
        if key in name.replace(" ", "").lower():
            return speed, True
    source = torch.empty(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    matrix = torch.randn(_SIDE[device.type], _SIDE[device.type], dtype=dtype, device=device)
    copying = seconds_of(lambda: target.copy_(source), device, repeats=_REPEATS)
    multiplying = seconds_of(lambda: matrix @ matrix, device, repeats=_REPEATS)
    bandwidth = 2 * source.nbytes / copying
    flops = 2 * len(matrix) ** 3 / multiplying
    return DeviceSpeed(name, bandwidth=bandwidth, flops=flops, link=bandwidth), False


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
