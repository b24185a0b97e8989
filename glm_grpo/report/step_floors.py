"""The least time a step can take, by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StepFloors:
    """Floors of one step.

    Attributes:
        device: The device whose published figures they follow from.
        seconds: By phase, in the order they are shown; `offload` where weights are moved.
    """

    device: str
    seconds: Mapping[str, float]

    @property
    def step(self) -> float:
        """Seconds of the phases one after the other."""
        return sum(self.seconds.values())
