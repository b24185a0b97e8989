"""Sample token grids, the same way in every family: read prompts, then draw token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicCache

from glm_grpo.models.drawing import Drawn, draw_uniforms
from glm_grpo.models.token_step import Step
from glm_grpo.types import ProgressCallback, PromptBatch, no_progress

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


def draw_grids(
    states: Float[Tensor, "R D"],
    step: Step,
    draw: Callable[[Tensor, Tensor], Drawn],
    batch: PromptBatch,
    *,
    num_tokens: int,
    on_progress: ProgressCallback = no_progress,
) -> list[Drawn]:
    """Draw the T tokens of all samples; random numbers are those of `glm_grpo.models.drawing`.

    Args:
        states: Those that predict the first tokens.
        step: Reads one token of every sample.
        draw: Draws one token of every sample from states and uniforms.
        num_tokens: T.
        on_progress: Called after each token.
    """
    uniforms = draw_uniforms(batch, num_tokens).to(states.device)
    read_and_draw = step.then(draw)
    sampled: list[Drawn] = []
    for index in range(num_tokens):
        if index == 0:
            drawn = draw(states, uniforms[:, 0])
        else:
            drawn = read_and_draw(drawn.token_ids, uniforms[:, index])
        if drawn.sampling_mask is not None:
            drawn = drawn._replace(sampling_mask=drawn.sampling_mask.cpu())
        sampled.append(drawn)
        on_progress(index + 1, num_tokens)
    return sampled
