"""Score images: reward terms, the table of their raw scores, and ways to weight it.

This package does not know how the images were made; it never imports `glm_grpo`. `score_images`
scores your own images, and `Prompt` describes what they should show. A function of your own may
return `Scores` with a score map or `ScoreBox`es, and a detector of your own `Detection`s.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rewards.detection import Detection
    from rewards.score_map import ScoreBox
    from rewards.standalone import score_images
    from rewards.types import Prompt, Scores

# Libraries send these by themselves unless told not to before they are imported. Here, because that
# is later, in no fixed order, and often by another library. What users set takes precedence; other
# processes inherit it.
for _variable, _value in {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime: its use, with an id of the machine, to Microsoft
    "DO_NOT_TRACK": "1",  # huggingface_hub: who downloads; some trackers: their use
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # datasets: a count of each load
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray: its use
    "WANDB_ERROR_REPORTING": "false",  # W&B: its errors
}.items():
    os.environ.setdefault(_variable, _value)

__all__ = ["Detection", "Prompt", "ScoreBox", "Scores", "score_images"]

_MODULES = {
    "Detection": "rewards.detection",
    "ScoreBox": "rewards.score_map",
    "Prompt": "rewards.types",
    "Scores": "rewards.types",
    "score_images": "rewards.standalone",
}


def __getattr__(name: str) -> object:
    """Import them on first use, because it takes a second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
