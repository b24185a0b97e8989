"""A reward that is easily gamed: the brightness of a picture, whatever the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float32, UInt8
from torch import Tensor

from rewards.types import Prompt


def brightness(
    prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
) -> Float32[Tensor, " N"]:
    """Mean of all pixels, 0 (black) to 1 (white)."""
    return pixels.float().mean(dim=(1, 2, 3)) / 255
