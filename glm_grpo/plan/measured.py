"""Compare a run's measured times with the floors of its config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import median

from rich.table import Table

from glm_grpo.errors import StorageError
from glm_grpo.plan.devices import DeviceSpeed, find_device
from glm_grpo.plan.floors import PhaseFloor
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.provenance import read_provenance
from glm_grpo.run.tables import read_metrics

_TIME = "time/"
_AFTER_STEP = ("time/evaluation", "time/records")
"""Times that are not part of `time/step`."""

_BETWEEN = "between phases"
"""Remaining time of a step, including offloading copies."""


def measured_seconds(folder: RunFolder) -> dict[str, float]:
    """Median seconds by phase, `between phases` and `step`, over all steps but the first.

    The first step also compiles, selects kernels and runs the self-check.
    """
    steps = [
        {
            name.removeprefix(_TIME): value
            for name, value in row.items()
            if name.startswith(_TIME) and name not in _AFTER_STEP and value is not None
        }
        for row in read_metrics(folder)
        if f"{_TIME}step" in row
    ][1:]
    if not steps:
        raise StorageError(
            f"{folder.metrics_path} has fewer than two steps, and the first one does not count; "
            "give a run of at least two"
        )
    for step in steps:
        whole = step.pop("step")
        step |= {_BETWEEN: whole - sum(step.values()), "step": whole}
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: median(step[name] for step in steps if name in step) for name in names}


def device_lines(folder: RunFolder, device: DeviceSpeed) -> list[str]:
    """Line on the devices of a run if they are others than the one that is planned for.

    A run of a version that did not store them counts as one on this device.
    """
    provenance = read_provenance(folder)
    devices = provenance.devices if provenance is not None else ""
    names = (re.sub(r"^\d+ x ", "", each) for each in devices.split("; "))
    if not devices or all(find_device(name) == device for name in names):
        return []
    return [
        f"the run was on {devices}: ratio and MFU compare it with another device, {device.name}"
    ]


def measured_table(
    folder: RunFolder,
    floors: Mapping[str, PhaseFloor],
    device: DeviceSpeed,
    *,
    is_asynchronous: bool,
) -> Table:
    """Minimum and measured time, their ratio and the model FLOPs utilisation (MFU) of each phase.

    Args:
        folder: Folder of a run with the same config as the floors.
        device: Device of the floors, see `device_lines`.
        is_asynchronous: Whether phases overlap, so that they do not add up to a step.
    """
    seconds = measured_seconds(folder)
    step, between = seconds.pop("step"), seconds.pop(_BETWEEN)
    table = Table(
        title=f"{folder.path.name}, median of its steps without the first; minimum of {device.name}"
    )
    table.add_column("phase")
    for column in ("minimum", "measured", "ratio", "MFU"):
        table.add_column(column, justify="right")
    for name, each in seconds.items():
        table.add_row(name, *_cells(floors.get(name), each, device))
    if is_asynchronous:
        return table
    table.add_row(_BETWEEN, *_cells(floors.get("offload"), between, device))
    whole = PhaseFloor(
        sum(floor.seconds for floor in floors.values()),
        sum(floor.flops for floor in floors.values()),
    )
    table.add_section()
    table.add_row("step", *_cells(whole, step, device))
    return table


def _cells(floor: PhaseFloor | None, seconds: float, device: DeviceSpeed) -> list[str]:
    measured = describe_seconds(seconds)
    if floor is None:
        return ["-", measured, "-", "-"]
    used = f"{floor.flops / (seconds * device.flops):.1%}" if floor.flops > 0 else "-"
    ratio = f"{seconds / floor.seconds:.3g} x"
    return [describe_seconds(floor.seconds), measured, ratio, used]


def describe_seconds(number: float) -> str:
    """Format seconds with three digits, in ms below one second."""
    if number < 1:
        return f"{number * 1000:.3g} ms"
    return f"{number:.3g} s" if number < 1000 else f"{number:.0f} s"
