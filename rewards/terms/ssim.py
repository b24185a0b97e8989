"""Structural similarity to the target picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.base import (
    Against,
    ComparingConfig,
    Reward,
    compared_picture,
    stack_compared,
    to_unit_range,
)
from rewards.types import Prompt


class SsimConfig(ComparingConfig):
    """Structural similarity to the prompt's target picture."""

    kind: Literal["ssim"]
    """Class that scores."""

    def build(self, device: torch.device) -> Reward:
        """See `TermConfig`."""
        del device
        return SsimReward(self.against)

    def memory_bytes(self) -> int:
        """Windows and differences, without weights."""
        return 0


class SsimReward:
    """Mean SSIM over the picture, -1..1, 1 for equal pictures.

    torchmetrics' definition: Gaussian window of sigma 1.5, channels averaged.
    Source: Wang et al., Image quality assessment: from error visibility to structural similarity,
    IEEE Transactions on Image Processing 13(4), 2004.
    """

    def __init__(self, against: Against = "target") -> None:
        self._against: Against = against

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has the picture to compare with."""
        return compared_picture(prompt, self._against) is not None

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Compare each picture with that of its prompt, on the device of the pictures.

        Raises:
            ValueError: It is missing or of another size.
        """
        from torchmetrics.functional.image import structural_similarity_index_measure  # noqa: PLC0415

        targets = to_unit_range(stack_compared(prompts, pixels, self._against), pixels.device)
        pictures = to_unit_range(pixels, pixels.device)
        # One by one: on the CPU, oneDNN's convolution by channel takes twice as long a picture for
        # a group, and the scores are the same to the bit.
        similarities = [
            structural_similarity_index_measure(picture, target, data_range=1.0, reduction="none")
            for picture, target in zip(pictures.split(1), targets.split(1), strict=True)
        ]
        # Tuples only where the contrast or the whole similarity image is asked for too.
        return torch.cat(cast("list[Tensor]", similarities))

    def modules(self) -> tuple[nn.Module, ...]:
        """SSIM has no network."""
        return ()
