"""The learning rate as a pure function of the number of updates done."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer


class LearningRate:
    """Linear warm-up to the peak, then constant or a cosine decay to 0.

    The first update runs at peak / warm-up, not at 0, so that it is not lost. As in transformers, a
    warm-up longer than the run is not shortened: the run ends before the peak.

    Args:
        warmup_updates: Updates until the peak, >= 0.
        total_updates: Number of updates after which the cosine reaches 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        peak: float,
        schedule: Literal["cosine", "constant"],
        warmup_updates: int,
        total_updates: int,
    ) -> None:
        self._optimizer = optimizer
        self._peak = peak
        self._schedule = schedule
        self._warmup_updates = warmup_updates
        self._total_updates = total_updates
        self.updates = 0
        self.set(0)

    def step(self) -> None:
        """Advance by one update."""
        self.set(self.updates + 1)

    def set(self, updates: int) -> None:
        """Set the rate for the update that follows `updates` updates."""
        self.updates = updates
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()

    def _rate(self) -> float:
        if self.updates < self._warmup_updates:
            return self._peak * (self.updates + 1) / self._warmup_updates
        if self._schedule == "constant":
            return self._peak
        span = max(1, self._total_updates - self._warmup_updates)
        progress = min(1.0, (self.updates - self._warmup_updates) / span)
        return self._peak * 0.5 * (1.0 + math.cos(math.pi * progress))
