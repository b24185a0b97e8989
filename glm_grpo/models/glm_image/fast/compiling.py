"""What the compiled networks share: options of Inductor, and why a faster form is not used."""

from __future__ import annotations

from typing import Any

from rewards.out_of_memory import is_out_of_memory

COMPILING: dict[str, Any] = {"emulate_precision_casts": True}
"""Options of Inductor: without it, fused operations skip roundings to bf16 that eager ones make."""

_LONGEST = 200
"""Characters of a compiler's message that are shown."""


def reason_of(error: Exception) -> str:
    """One line on why a faster form cannot be used.

    Raises:
        Exception: The same error, if memory ran out: a slower form would not help.
    """
    if is_out_of_memory(error):
        raise error
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"
