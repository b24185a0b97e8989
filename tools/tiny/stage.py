"""Run resumable training stages: the same loop for every part of the embedded models."""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY = 250
"""Steps between snapshots, the most that a killed stage loses."""


@dataclass(frozen=True)
class Schedule:
    """Optimizer settings of a stage: AdamW, linear warm-up, cosine decay to 2 % of the peak."""

    steps: int
    learning_rate: float
    warmup_steps: int = 100
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def rate_at(self, step: int) -> float:
        """Learning rate of a step, from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train_stage(
    name: str,
    modules: Sequence[nn.Module],
    loss_at: Callable[[np.random.Generator, torch.Generator, int], Tensor],
    *,
    schedule: Schedule,
    folder: Path,
    seed: int,
) -> None:
    """Train `modules` in place, continuing from the newest snapshot of the stage.

    The batch of a step is a function of (seed, stage, step), so an interrupted stage ends with the
    same weights as an uninterrupted one.

    Args:
        name: Name of the stage and its snapshot.
        modules: Modules to train together: all their parameters that require a gradient.
        loss_at: Scalar loss of a step, given generators seeded for that step.
        schedule: Steps and learning rate.
        folder: Folder of the snapshots.
        seed: Seed of the whole pre-training.
    """
    snapshot = folder / f"{name}.snapshot.pt"
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=schedule.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=schedule.weight_decay,
    )
    first = 0
    if snapshot.exists():
        state = torch.load(snapshot, weights_only=True)
        for module, weights in zip(modules, state["modules"], strict=True):
            module.load_state_dict(weights)
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    recent: list[float] = []
    started = time.monotonic()
    for step in range(first, schedule.steps):
        entropy = np.random.SeedSequence([seed, *name.encode(), step])
        rng = np.random.default_rng(entropy)
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        loss = loss_at(rng, generator, step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, schedule.max_grad_norm)
        optimizer.step()
        recent.append(loss.item())
        if (step + 1) % 50 == 0:
            per_step = (time.monotonic() - started) / (step + 1 - first)
            logger.info(
                "%s %d/%d loss %.4f  %.3f s/step",
                name,
                step + 1,
                schedule.steps,
                sum(recent) / len(recent),
                per_step,
            )
            recent.clear()
        if (step + 1) % SNAPSHOT_EVERY == 0 or step + 1 == schedule.steps:
            weights = [module.state_dict() for module in modules]
            state = {"modules": weights, "optimizer": optimizer.state_dict(), "step": step + 1}
            partial = snapshot.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(snapshot)


def run_stages(
    stages: Sequence[str], run: Callable[[str, Path], None], *, description: str
) -> None:
    """Run the command line of a pre-training.

    Args:
        stages: Names of all stages, in order.
        run: Runs one of them, with its snapshots in a folder.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, required=True, help="folder of the snapshots")
    parser.add_argument("--stage", choices=stages, action="append", help="default: all")
    parser.add_argument(
        "--threads", type=int, default=1, help="sums depend on it; the shipped weights: 1"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for stage in arguments.stage or stages:
        run(stage, arguments.work)
