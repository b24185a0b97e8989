"""How much memory a run takes, by phase and by what takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PHASES = ("rollout", "decode", "reward", "update", "idle")
"""Of a step; idle is what stays on the accelerator whatever the phase."""

PhaseBytes = Mapping[str, int]
"""Bytes by phase; 0 where a phase is left out."""


@dataclass(frozen=True)
class MemoryItem:
    """One thing that takes memory.

    Attributes:
        name: For people.
        by_phase: Bytes on the accelerator.
        cpu: Bytes in CPU memory for the whole run, where it waits there or stays there.
    """

    name: str
    by_phase: PhaseBytes
    cpu: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes.

    Attributes:
        items: In the order they are shown.
        is_on_accelerator: False: there is none, and phases are in CPU memory like all else.
        overhead: Bytes that driver and libraries take on the accelerator.
        cpu_at_start: Most bytes in CPU memory while the models are loaded.
        moved_in: Bytes that offloading copies to the accelerator in one step.
        moved_out: Bytes that offloading copies back in one step.
    """

    items: tuple[MemoryItem, ...]
    is_on_accelerator: bool
    overhead: int
    cpu_at_start: int
    moved_in: int
    moved_out: int

    def total(self, phase: str) -> int:
        """Bytes of a phase where it runs, overhead included."""
        cpu = 0 if self.is_on_accelerator else self.cpu
        return self.overhead + cpu + sum(item.by_phase.get(phase, 0) for item in self.items)

    @property
    def cpu(self) -> int:
        """Bytes that lie in CPU memory for the whole run."""
        return sum(item.cpu for item in self.items)

    @property
    def peak_phase(self) -> str:
        """The phase that takes most."""
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes of that phase: what --memory is held against."""
        return self.total(self.peak_phase)


@dataclass(frozen=True)
class MemoryAdvice:
    """Settings under which a run fits.

    Attributes:
        overrides: As on the command line, to be set together.
        peak: Bytes with them.
    """

    overrides: tuple[str, ...]
    peak: int
