"""Share of pictures of the synthetic world that are exactly what was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from glm_grpo.tiny.world import CELL, cell_atlas
from rewards.types import Prompt


def exact(prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """1 where every cell of a picture is that of the prompt's target, else 0.

    A cell is the one of the world that it differs least from, so that neither noise nor blur
    counts. For a reward term of `kind: custom` with `needs_of_prompt: [target]`.
    """
    targets = torch.stack([prompt.target for prompt in prompts if prompt.target is not None])
    return (nearest_cells(pixels) == nearest_cells(targets)).all(dim=1).float()


def nearest_cells(pixels: UInt8[Tensor, "N 3 H W"]) -> Int64[Tensor, "N C"]:
    """Ids of the cells that the parts of pictures are nearest to, row by row."""
    atlas = cell_atlas().flatten(1).float()
    parts = pixels.unfold(2, CELL, CELL).unfold(3, CELL, CELL)  # N 3 h w 32 32
    flat = parts.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2).float()
    return torch.cdist(flat, atlas).argmin(dim=-1)
