"""Sizes, order and 3-D positions of the tokens GLM-Image generates, as pure functions.

Text-to-image generates two grids one after the other: a preview of about 256 tokens, then the
target grid of (H / 32) x (W / 32). An edit generates only the target grid. Only the target tokens
reach the decoder; each covers 2 x 2 of its patches.

Source: `GlmImageProcessor._get_target_shape`, `GlmImageModel.get_rope_index` (transformers) and
`GlmImagePipeline._upsample_token_ids` (diffusers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from glm_grpo.types import PromptBatch

PIXELS_PER_TOKEN = 32
"""Side, in pixels, of the square that one target token represents."""

_PREVIEW_SIDE = 16
"""Side of a square image's preview grid, in tokens."""


@dataclass(frozen=True)
class TokenLayout:
    """Token grids of one image size.

    Attributes:
        preview: (rows, columns) of the grid generated first; (0, 0) for edits, which have none.
        target: (rows, columns) of the grid generated second, which is decoded.
    """

    preview: tuple[int, int]
    target: tuple[int, int]

    @property
    def num_preview(self) -> int:
        """Number of tokens in the preview grid."""
        return self.preview[0] * self.preview[1]

    @property
    def num_target(self) -> int:
        """Number of tokens in the target grid."""
        return self.target[0] * self.target[1]

    @property
    def num_tokens(self) -> int:
        """T, the number of generated tokens per image."""
        return self.num_preview + self.num_target


def token_layout(height: int, width: int, *, has_preview: bool = True) -> TokenLayout:
    """Grids generated for an image of `height` x `width` pixels.

    Args:
        height: Image height in pixels, a multiple of 32.
        width: Image width in pixels, a multiple of 32.
        has_preview: Whether a preview is generated; False for edits.

    Raises:
        ValueError: A side is not a positive multiple of 32 pixels.
    """
    for name, side in (("height", height), ("width", width)):
        if side < PIXELS_PER_TOKEN or side % PIXELS_PER_TOKEN:
            raise ValueError(
                f"{name} is {side} pixels; it must be a positive multiple of {PIXELS_PER_TOKEN}; "
                f"use {max(1, round(side / PIXELS_PER_TOKEN)) * PIXELS_PER_TOKEN}"
            )
    rows, columns = height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN
    if not has_preview:
        return TokenLayout(preview=(0, 0), target=(rows, columns))
    ratio = rows / columns
    preview = (int(math.sqrt(ratio) * _PREVIEW_SIDE), int(math.sqrt(1 / ratio) * _PREVIEW_SIDE))
    return TokenLayout(preview=preview, target=(rows, columns))


def batch_layout(batch: PromptBatch) -> TokenLayout:
    """Grids generated for each image of a batch."""
    return token_layout(batch.height, batch.width, has_preview=batch.num_sources == 0)


def generated_positions(layout: TokenLayout, first_position: int) -> Int64[Tensor, "3 T"]:
    """Temporal, height and width position of every generated token.

    Within a grid the temporal position is constant, and height and width count from the grid's
    first position; the next grid starts max(rows, columns) later.

    Args:
        layout: Grids in the order in which they are generated.
        first_position: The position after the last prompt token.
    """
    parts = []
    position = first_position
    for rows, columns in (layout.preview, layout.target):
        row = torch.arange(rows).repeat_interleave(columns)
        column = torch.arange(columns).repeat(rows)
        parts.append(torch.stack([torch.zeros_like(row), row, column]) + position)
        position += max(rows, columns)
    return torch.cat(parts, dim=1)


def target_token_ids(
    token_ids: Int64[Tensor, "*B T"], layout: TokenLayout
) -> Int64[Tensor, "*B S"]:
    """Tokens of the target grid (S of them), row by row."""
    return token_ids[..., layout.num_preview :]


def upsample_token_ids(
    token_ids: Int64[Tensor, "*B S"], layout: TokenLayout
) -> Int64[Tensor, "*B S4"]:
    """Repeat target tokens 2 x 2 (nearest) for the decoder, which makes four times as many."""
    grid = token_ids.unflatten(-1, layout.target)
    return grid.repeat_interleave(2, -2).repeat_interleave(2, -1).flatten(-2)
