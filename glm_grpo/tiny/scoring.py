"""Score images of the synthetic world by whether they match the prompt exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from glm_grpo.tiny.world import CELL, cell_atlas
from rewards.types import Prompt


def exact(prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """1 if every cell of an image matches the prompt's target, else 0.

    A cell counts as the most similar one of the world, so that neither noise nor blur matters. For
    a reward term of `kind: custom` with `needs_of_prompt: [target]`.
    """
    targets = torch.stack([prompt.target for prompt in prompts if prompt.target is not None])
    return (nearest_cells(pixels) == nearest_cells(targets)).all(dim=1).float()


def nearest_cells(pixels: UInt8[Tensor, "N 3 H W"]) -> Int64[Tensor, "N C"]:
    """Ids of the most similar cells for the parts of each image, row by row."""
    atlas = cell_atlas().flatten(1).float()
    parts = pixels.unfold(2, CELL, CELL).unfold(3, CELL, CELL)  # N 3 h w 32 32
    flat = parts.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2).float()
    return torch.cdist(flat, atlas).argmin(dim=-1)
