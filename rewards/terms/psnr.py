"""Score the peak signal-to-noise ratio to the target image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from typing_extensions import override

from rewards.base import (
    ComparingConfig,
    ComparingReward,
    Reward,
    stack_compared,
    to_unit_range,
)
from rewards.types import Prompt, Scores

BEST_DECIBELS = 50.0
"""PSNR from which images count as equal. Rounding to 8 bits gives 59 dB, JPEG of good quality 30
to 50 dB."""

_LEAST_DIFFERENCE = 1 / 255**2
"""Sum of squared differences of images that differ by one level in one value."""


class PsnrConfig(ComparingConfig):
    """Peak signal-to-noise ratio to the prompt's target image."""

    score_map = "always"

    kind: Literal["psnr"]
    """Class that scores."""

    @override
    def build(self, device: torch.device) -> Reward:
        del device
        return PsnrReward(self.against)

    @override
    def memory_bytes(self) -> int:
        """0: there are no weights, only differences."""
        return 0


class PsnrReward(ComparingReward):
    """PSNR in decibels, limited to `BEST_DECIBELS` and divided by it: 0..1, higher is better.

    PSNR = 10 log10(1 / mean squared difference) of pixels in 0..1, over all pixels and channels of
    an image. The score is 1 for equal images, whose PSNR is infinite, and 0 for black against
    white.

    Needs a target image, but no model and hardly any memory. torchmetrics' definition,
    Apache-2.0.
    """

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Compare each image with that of its prompt, on the device of the images."""
        images, targets = self._pairs(prompts, pixels)
        return _compare(images, targets)

    @torch.no_grad()
    def score_with_map(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Like `score`; every pixel has an equal share of the 1, less its part of what is lost.

        PSNR is no sum over pixels, so 1 - score is divided between them by squared difference.
        """
        images, targets = self._pairs(prompts, pixels)
        values = _compare(images, targets)
        squares = (images - targets).square().sum(dim=1)
        # Equal images have lost nothing.
        totals = squares.sum(dim=(1, 2), keepdim=True).clamp(min=_LEAST_DIFFERENCE)
        losses = (1 - values)[:, None, None] * squares / totals
        return Scores(values, score_map=1 / squares[0].numel() - losses)

    def _pairs(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> tuple[Float32[Tensor, "N 3 H W"], Float32[Tensor, "N 3 H W"]]:
        targets = to_unit_range(stack_compared(prompts, pixels, self._against), pixels.device)
        return to_unit_range(pixels, pixels.device), targets


def _compare(
    images: Float32[Tensor, "N 3 H W"], targets: Float32[Tensor, "N 3 H W"]
) -> Float32[Tensor, " N"]:
    from torchmetrics.functional.image import peak_signal_noise_ratio  # noqa: PLC0415

    decibels = peak_signal_noise_ratio(
        images, targets, data_range=1.0, reduction="none", dim=(1, 2, 3)
    )
    return decibels.clamp(0.0, BEST_DECIBELS) / BEST_DECIBELS
