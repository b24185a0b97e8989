"""Shared by the compiled networks: options of Inductor, and reasons to fall back."""

from __future__ import annotations

from typing import Any

from rewards.out_of_memory import is_out_of_memory

COMPILING: dict[str, Any] = {"emulate_precision_casts": True}
"""Options of Inductor. Fused operations then round to bf16 where eager ones do."""

_LONGEST = 200
"""Characters of a compiler's message to show."""


def reason_of(error: Exception) -> str:
    """Say in one line why a faster form cannot be used.

    Raises:
        Exception: The same error, if memory ran out: a slower form would not help.
    """
    if is_out_of_memory(error):
        raise error
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"
