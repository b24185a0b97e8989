"""Run state that is not tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class RunState:
    """Progress of a run, apart from tensors.

    Attributes:
        step: Training steps done.
        best_step: Step of the best evaluation so far.
        best_total: Mean total of the best evaluation.
        skipped_in_a_row: Steps since the last one with a finite update.
        canaries_outside: For each canary outside its band, the steps or evaluations in a row.
        start_step: Step of the checkpoint that initialised the run (`model.start_from`); None: no
            checkpoint.
    """

    step: int = 0
    best_step: int | None = None
    best_total: float = -torch.inf
    skipped_in_a_row: int = 0
    canaries_outside: dict[str, int] = field(default_factory=dict)
    start_step: int | None = None

    def note_best(self, total: float) -> bool:
        """Record an evaluation of the current step; returns whether it is the best so far."""
        # NaN, of an evaluation without any total, is not the best.
        if not total > self.best_total:
            return False
        self.best_step, self.best_total = self.step, total
        return True
