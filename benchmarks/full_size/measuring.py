"""Measure seconds, and the peak performance of the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from glm_grpo.plan.devices import DeviceSpeed, find_device

if TYPE_CHECKING:
    from benchmarks.full_size.scale import Bench, Rows

_COPIED = {"cuda": 2**31, "cpu": 2**27}
"""Bytes to copy; many times the caches."""

_SIDE = {"cuda": 8192, "cpu": 1024}
"""Side of the square matrices to multiply."""

_REPEATS = 3


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int = 1) -> float:
    """Seconds of the fastest of some runs, including waiting for the device."""
    fastest = float("inf")
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def speed_of(device: torch.device) -> DeviceSpeed:
    """Published performance of the device; for unknown devices, measured here."""
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    published = find_device(name)
    if published is not None:
        return published
    bandwidth = _copying(device)
    flops = _multiplying(device)
    return DeviceSpeed(name, bandwidth=bandwidth, flops=flops, link=bandwidth)


def ceilings(bench: Bench) -> Rows:
    """Section: compare the device's performance with its published values."""
    device = bench.device

    def bandwidth() -> dict[str, Any]:
        reached = _copying(device)
        return {"bytes_per_second": reached, "share": reached / bench.speed.bandwidth}

    def flops() -> dict[str, Any]:
        reached = _multiplying(device)
        return {"flops": reached, "share": reached / bench.speed.flops}

    def link() -> dict[str, Any]:
        source = torch.empty(_COPIED[device.type], dtype=torch.uint8)
        if bench.is_on_accelerator:
            source = source.pin_memory()
        target = torch.empty_like(source, device=device)
        seconds = seconds_of(
            lambda: target.copy_(source, non_blocking=True), device, repeats=_REPEATS
        )
        reached = source.nbytes / seconds
        return {"bytes_per_second": reached, "share": reached / bench.speed.link}

    yield "bandwidth", bandwidth
    yield "matrices", flops
    yield "from CPU memory", link


def _copying(device: torch.device) -> float:
    """Bytes read and written per second."""
    source = torch.empty(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device, repeats=_REPEATS)


def _multiplying(device: torch.device) -> float:
    """Operations per second."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    matrix = torch.randn(_SIDE[device.type], _SIDE[device.type], dtype=dtype, device=device)
    return 2 * len(matrix) ** 3 / seconds_of(lambda: matrix @ matrix, device, repeats=_REPEATS)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
