"""What a reward term is, and what most of them need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.types import Prompt


@runtime_checkable
class Reward(Protocol):
    """One term: looks at pictures, returns one score each, higher is better.

    A term raises where it cannot score; it never returns a number in place of a failure.
    """

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the term compares with.

        Raises:
            RewardError: It has, and the term could not score any picture against it.
        """
        ...

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Score N pictures, picture i against prompt i; runs on the device of `modules()`.

        Args:
            prompts: N prompts to which the term applies; the same one may occur often.
            pixels: RGB, 0..255, on any device.

        Returns:
            One finite score per picture, independent of the other pictures.
        """
        ...

    def modules(self) -> tuple[nn.Module, ...]:
        """Networks that may be moved between devices while the term is idle; may be empty."""
        ...


def stack_targets(
    prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
) -> UInt8[Tensor, "N 3 H W"]:
    """Stack the prompts' target pictures.

    Raises:
        ValueError: A prompt has no target, or one of another size than the pictures.
    """
    targets = []
    for prompt in prompts:
        if prompt.target is None:
            raise ValueError(
                f"prompt {prompt.prompt_id} has no target picture to compare with; "
                "score only prompts to which the term applies"
            )
        if prompt.target.shape != pixels.shape[1:]:
            raise ValueError(
                f"target of prompt {prompt.prompt_id} is {_size(prompt.target)}, the picture "
                f"{_size(pixels)}: both must have one size; resize targets when loading them"
            )
        targets.append(prompt.target)
    return torch.stack(targets)


def to_unit_range(
    pixels: UInt8[Tensor, "N 3 H W"], device: torch.device
) -> Float32[Tensor, "N 3 H W"]:
    """Move pixels to a device and scale them from 0..255 to 0..1."""
    return pixels.to(device).float() / 255


def _size(pixels: Tensor) -> str:
    height, width = pixels.shape[-2:]
    return f"{width} x {height}"
