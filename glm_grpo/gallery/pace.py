"""When a run recorded its last figures, and how long its steps take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from glm_grpo.run.folder import RunFolder, storage_errors
from glm_grpo.run.tables import MetricsRow

_RECENT = 10
"""Steps whose time counts: a run that was resumed elsewhere has another pace than before."""


def pace(folder: RunFolder, metrics: Mapping[int, MetricsRow]) -> dict[str, Any]:
    """What an open page needs to tell how long a run still takes.

    Args:
        folder: The run.
        metrics: By step, in order.

    Returns:
        `recorded`: when the last figures were recorded, in seconds since 1970; `seconds_per_step`:
        the median of the last ten steps, evaluations and checkpoints aside. None where not known.

    Raises:
        StorageError: The folder cannot be looked at.
    """
    recorded = None
    with storage_errors("read", folder.metrics_path):
        if folder.metrics_path.exists():
            recorded = int(folder.metrics_path.stat().st_mtime)
    times = [row.get("time/step") for row in metrics.values()]
    recent = [seconds for seconds in times if seconds is not None][-_RECENT:]
    return {
        "recorded": recorded,
        "seconds_per_step": round(statistics.median(recent), 3) if recent else None,
    }
