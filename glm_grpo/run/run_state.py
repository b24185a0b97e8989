"""State of a run that is not tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class RunState:
    """Where a run stands; the part of its state that is not tensors.

    Attributes:
        step: Training steps done.
        best_step: Step of the best evaluation so far.
        best_total: Its mean total.
        skipped_in_a_row: Steps since the last one with a finite update.
        full_decode_from: First step whose rollouts take all denoising steps because fewer ranked
            badly; None while they do not.
        start_step: Of the checkpoint that the run began with (`model.start_from`); None: of none.
    """

    step: int = 0
    best_step: int | None = None
    best_total: float = -torch.inf
    skipped_in_a_row: int = 0
    full_decode_from: int | None = None
    start_step: int | None = None

    def note_best(self, total: float) -> bool:
        """Whether this evaluation of the present step is the best so far."""
        if total <= self.best_total:
            return False
        self.best_step, self.best_total = self.step, total
        return True
