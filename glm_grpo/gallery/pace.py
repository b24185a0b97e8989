"""When a run recorded its last figures, and how long it still takes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from glm_grpo.run.folder import RunFolder, storage_errors
from glm_grpo.run.tables import MetricsRow

_RECENT = 10
"""Steps whose time counts: a run that was resumed elsewhere has another pace than before."""


def pace(
    folder: RunFolder,
    metrics: Mapping[int, MetricsRow],
    *,
    steps: int | None,
    eval_every: int | None,
) -> dict[str, Any]:
    """What an open page needs to tell how long a run still takes.

    Args:
        folder: The run.
        metrics: By step, in order.
        steps: Of the run; None where its config cannot be read.
        eval_every: Steps from one evaluation to the next; None as `steps`.

    Returns:
        `recorded`: when the last figures were recorded, in seconds since 1970; `seconds_per_step`:
        the median of the last ten steps, evaluations and checkpoints aside; `seconds_left`: then,
        with the evaluations to come, each as long as the last one. None where not known.

    Raises:
        StorageError: The folder cannot be looked at.
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
