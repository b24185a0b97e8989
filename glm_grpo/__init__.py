"""GRPO fine-tuning of AR-plus-diffusion image models.

The Python API, see `glm_grpo.api`: load_config, train, load_run, rescore, evaluate.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

# Turns off what libraries would send by themselves, before any of them is imported.
import rewards  # noqa: F401

if TYPE_CHECKING:
    from glm_grpo.api import Run, evaluate, load_config, load_run, rescore, train

__all__ = ["Run", "evaluate", "load_config", "load_run", "rescore", "train"]

# It warns about kernels that only CPUs would use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def __getattr__(name: str) -> object:
    """Import the API on first use, because it takes seconds, which help texts need not wait for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("glm_grpo.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
