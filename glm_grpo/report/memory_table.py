"""A memory plan for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from glm_grpo.report.memory_plan import PHASES, MemoryAdvice, MemoryPlan
from glm_grpo.report.step_floors import StepFloors

GIGABYTE = 10**9

_STEPS = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


def memory_table(plan: MemoryPlan, *, title: str) -> Table:
    """Bytes by item and phase; the phase that takes most is bold."""
    place = "accelerator" if plan.is_on_accelerator else "CPU memory"
    table = Table(title=title, caption=f"phases: {place}, 1 GB = 1e9 bytes")
    table.add_column("")
    for phase in PHASES:
        style = "bold" if phase == plan.peak_phase else ""
        table.add_column(phase, justify="right", style=style)
    table.add_column("CPU memory", justify="right")
    for item in plan.items:
        cells = [_cell(item.by_phase.get(phase, 0)) for phase in PHASES]
        table.add_row(item.name, *cells, _cell(item.cpu))
    if plan.overhead:
        table.add_row("driver and libraries", *[_cell(plan.overhead)] * len(PHASES), "")
    table.add_section()
    totals = [_cell(plan.total(phase)) for phase in PHASES]
    table.add_row("total", *totals, _cell(plan.cpu))
    return table


def memory_lines(plan: MemoryPlan) -> list[str]:
    """The figures a table has no column for."""
    lines = [
        f"peak: {describe_bytes(plan.peak)} in the {plan.peak_phase} phase",
        f"CPU memory while the models are loaded: {describe_bytes(plan.cpu_at_start)}",
    ]
    if plan.moved_in:
        lines.append(
            f"offloading copies {describe_bytes(plan.moved_in)} to the accelerator and "
            f"{describe_bytes(plan.moved_out)} back in a step"
        )
    return lines


def floor_lines(floors: StepFloors) -> list[str]:
    """The least time a step takes, and what that figure is."""
    phases = ", ".join(
        f"{name} {describe_seconds(seconds)}" for name, seconds in floors.seconds.items()
    )
    return [
        f"a step takes at least {describe_seconds(floors.step)} on {floors.device}, "
        f"its phases one after the other: {phases}",
        "(floors, no predictions: published peak figures, nothing lost, reward terms not counted)",
    ]


def advice_lines(advice: Sequence[MemoryAdvice], *, memory: int) -> list[str]:
    """What to change, one line a choice; each was planned, not estimated."""
    if not advice:
        return ["no change of one key, nor all of them together, makes it fit"]
    return [
        f"it fits with {' '.join(one.overrides)}: {describe_bytes(one.peak)}, "
        f"{describe_bytes(memory - one.peak)} to spare"
        for one in advice
    ]


def describe_bytes(number: int) -> str:
    """In the largest decimal unit that leaves a digit before the point, with two after it."""
    for size, unit in _STEPS:
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"


def describe_seconds(number: float) -> str:
    """With three digits, in ms below a second."""
    if number < 1:
        return f"{number * 1000:.3g} ms"
    return f"{number:.3g} s" if number < 1000 else f"{number:.0f} s"


def _cell(number: int) -> str:
    return describe_bytes(number) if number else "-"
