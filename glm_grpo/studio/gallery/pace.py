"""Estimate when a run last recorded metrics, and how long it will still take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from glm_grpo.run.folder import RunFolder, storage_errors
from glm_grpo.run.tables import MetricsRow

_RECENT = 10
"""Number of recent steps that count, because a run resumed elsewhere has another pace."""


def pace(
    folder: RunFolder,
    metrics: Mapping[int, MetricsRow],
    *,
    steps: int | None,
    eval_every: int | None,
) -> dict[str, Any]:
    """Values from which an open page shows how long a run will still take.

    Args:
        metrics: Metrics by step, in order.
        steps: Number of steps of the run; None if its config cannot be read.
        eval_every: Steps between evaluations; None if the config cannot be read.

    Returns:
        `recorded`: when the last metrics were recorded, in seconds since 1970; `seconds_per_step`:
        median of the last ten steps, excluding evaluations and checkpoints; `seconds_left`:
        remaining time at that moment, including evaluations as long as the last one. None if
        unknown.
    """
    recorded = None
    with storage_errors("read", folder.metrics_path):
        if folder.metrics_path.exists():
            recorded = int(folder.metrics_path.stat().st_mtime)
    times = [row.get("time/step") for row in metrics.values()]
    recent = [seconds for seconds in times if seconds is not None][-_RECENT:]
    if not recent:
        return {"recorded": recorded, "seconds_per_step": None, "seconds_left": None}
    a_step, left = statistics.median(recent), None
    if steps is not None and eval_every is not None:
        last = max(metrics)
        evaluated = [step for step, row in metrics.items() if row.get("time/evaluation")]
        an_evaluation = metrics[evaluated[-1]]["time/evaluation"] if evaluated else None
        to_come = sum(
            step % eval_every == 0 or step == steps
            for step in range(max(evaluated, default=0) + 1, steps + 1)
        )
        left = round((steps - last) * a_step + to_come * (an_evaluation or 0.0), 3)
    return {"recorded": recorded, "seconds_per_step": round(a_step, 3), "seconds_left": left}
