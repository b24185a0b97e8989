"""What the samplers of all families share: how many prompts they sample at once, and read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicCache

PREFILLED_AT_ONCE = 8
"""Prompts per forward pass of a rollout."""


def prompts_at_once(prompts: int, group_size: int, batch_size: int | None) -> int:
    """Number of prompts whose images are sampled at once, at least one.

    Args:
        batch_size: Images to sample at once; None: all.
    """
    return prompts if batch_size is None else max(1, min(prompts, batch_size // group_size))


def prefill(
    read: Callable[[slice, DynamicCache], Tensor], num_rows: int
) -> tuple[Float[Tensor, "R D"], list[DynamicCache]]:
    """Read prompts in chunks, because an evaluation has many more of them than a training step.

    Args:
        read: Reads some rows with an empty cache, and returns the states of all their tokens.
        num_rows: R, rows of the language model.

    Returns:
        The last state of each row, and the keys and values of each chunk.
    """
    states: list[Tensor] = []
    caches: list[DynamicCache] = []
    for start in range(0, num_rows, PREFILLED_AT_ONCE):
        caches.append(DynamicCache())
        states.append(read(slice(start, start + PREFILLED_AT_ONCE), caches[-1])[:, -1])
    return torch.cat(states), caches
