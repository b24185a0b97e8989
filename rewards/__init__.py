"""Score pictures: reward terms, the table of their raw scores, and ways to weight it.

This package does not know how the pictures were made; it never imports `glm_grpo`. `score_images`
scores your own pictures, and `Prompt` describes what they should show.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rewards.standalone import score_images
    from rewards.types import Prompt

__all__ = ["Prompt", "score_images"]


def __getattr__(name: str) -> object:
    """Import them on first use, because it takes a second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("rewards.standalone"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
