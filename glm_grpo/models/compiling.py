"""Shared by faster forms of networks: options of Inductor, tolerances, reasons to fall back."""

from __future__ import annotations

from typing import Any

import torch

from rewards.out_of_memory import is_out_of_memory

COMPILING: dict[str, Any] = {"emulate_precision_casts": True}
"""Options of Inductor. Fused operations then round to 16 bits where eager ones do."""

STEP_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of hidden states of a token step from those of the eager one, as a fraction of
the largest one, by their dtype."""

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
