"""Score structural similarity to the target image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from typing_extensions import override

from rewards.base import (
    Against,
    ComparingConfig,
    ComparingReward,
    Reward,
    stack_compared,
    to_unit_range,
)
from rewards.types import Prompt, Scores

WINDOW, SIGMA = 11, 1.5
C1, C2 = 0.01**2, 0.03**2


class SsimConfig(ComparingConfig):
    """Structural similarity to the prompt's target image."""

    score_map = "always"

    kind: Literal["ssim"]
    """Class that scores."""

    @override
    def build(self, device: torch.device) -> Reward:
        return SsimReward(device, against=self.against)

    @override
    def memory_bytes(self) -> int:
        """0: there are no weights, only windows and differences."""
        return 0


class SsimReward(ComparingReward):
    """Mean SSIM over the image, -1..1; exactly 1 for equal images and never more.

    Gaussian window of sigma 1.5, borders mirrored, channels averaged.
    Source: Wang et al., Image quality assessment: from error visibility to structural similarity,
    IEEE Transactions on Image Processing 13(4), 2004.
    """

    def __init__(self, device: torch.device, *, against: Against = "target") -> None:
        super().__init__(against)
        self._device = device

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Compare each image with that of its prompt."""
        return torch.cat([_value(losses) for losses in self._losses(prompts, pixels)])

    @torch.no_grad()
    def score_with_map(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Like `score`; each pixel earned its similarity, divided by the number of pixels."""
        values, maps = [], []
        for losses in self._losses(prompts, pixels):
            values.append(_value(losses))
            maps.append((1 - losses.mean(dim=1)) / losses[0, 0].numel())
        return Scores(torch.cat(values), score_map=torch.cat(maps))

    def _losses(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Iterator[Float32[Tensor, "1 3 H W"]]:
        """1 - similarity at each pixel of one image after the other."""
        targets = to_unit_range(stack_compared(prompts, pixels, self._against), self._device)
        images = to_unit_range(pixels, self._device)
        # One by one: on the CPU, oneDNN's depthwise convolution takes twice as long per image for
        # a group, with bitwise equal scores.
        return map(_losses_of_image, images.split(1), targets.split(1))


def _value(losses: Float32[Tensor, "1 3 H W"]) -> Float32[Tensor, " 1"]:
    return 1 - losses.mean(dim=(1, 2, 3))


def _losses_of_image(
    image: Float32[Tensor, "1 3 H W"], target: Float32[Tensor, "1 3 H W"]
) -> Float32[Tensor, "1 3 H W"]:
    """1 - SSIM at each pixel, from the moments of the images' sum and difference.

    With s = x + y and d = x - y, 2 cov(x, y) is (var s - var d) / 2, var x + var y is (var s + var
    d) / 2, and the means follow the same rule. In fp32, moments of x and y have rounding errors as
    large as `C2` on flat images, so that a copy would not be the best image; those of d are
    exactly 0 for equal images and small for similar ones. fp64 takes 25 times as long on a CPU.
    """
    from torchvision.transforms.functional import gaussian_blur  # noqa: PLC0415

    # Variances are those of s - 1, which rounds least; the mean is corrected below.
    total, difference = image + target - 1, image - target
    moments = torch.cat((total, difference, total.square(), difference.square()), dim=1)
    means = gaussian_blur(moments, [WINDOW, WINDOW], [SIGMA, SIGMA]).chunk(4, dim=1)
    variance_total = (means[2] - means[0].square()).clamp(min=0)
    variance_difference = (means[3] - means[1].square()).clamp(min=0)
    mean_total, mean_difference = (means[0] + 1).square(), means[1].square()
    luminance = (mean_total - mean_difference + 2 * C1) / (mean_total + mean_difference + 2 * C1)
    structure = (variance_total - variance_difference + 2 * C2) / (
        variance_total + variance_difference + 2 * C2
    )
    return 1 - luminance * structure
