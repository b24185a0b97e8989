"""Length of a run, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm_grpo.grpo.update import UpdateSettings
from glm_grpo.training.collect import CollectSettings


@dataclass(frozen=True)
class LoopSettings:
    """Length of a run and what is kept of it.

    Attributes:
        steps: Training steps in all.
        eval_every: Steps between evaluations; one before the first and one after the last besides.
        checkpoint_every: Steps between checkpoints.
        keep_checkpoints: Newest ones kept; the best by evaluation is kept besides.
        collect: How experience is made.
        update: How it is learnt from.
        is_stopping_on_hacking: Whether a canary that leaves its band ends the run.
    """

    steps: int
    eval_every: int
    checkpoint_every: int
    keep_checkpoints: int
    collect: CollectSettings
    update: UpdateSettings
    is_stopping_on_hacking: bool


@dataclass
class Progression:
    """Where a run stands; the part of its state that is not weights.

    Attributes:
        step: Training steps done.
        best_step: Step of the best evaluation so far.
        best_total: Its mean total.
        skipped_in_a_row: Non-finite updates since the last good one.
        full_decode_from: First step whose rollouts take all denoising steps because fewer ranked
            badly; None while they do not.
    """

    step: int = 0
    best_step: int | None = None
    best_total: float = -torch.inf
    skipped_in_a_row: int = 0
    full_decode_from: int | None = None
