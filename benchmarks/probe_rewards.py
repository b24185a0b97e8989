"""Rewards of every kind for the miniature that draws shapes, some of which no model can learn."""

from __future__ import annotations

import zlib
from functools import cache

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from rewards import Prompt, Scores
from rewards.base import Reward
from rewards.terms.composition import CompositionConfig

_CHANCE = torch.Generator().manual_seed(0)
_REACHED = 0.4
"""Nine of ten images of the base model score more."""
_PERFECT = 0.9995
"""One image in fifteen scores more."""
_NOISE = 0.4
"""Twice the spread that `dense` has inside groups."""


def dense(prompts: list[Prompt], images: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """How far an image shows what its prompt asks for, 0..1."""
    found = _composition().score(prompts, images)
    return torch.as_tensor(found.values if isinstance(found, Scores) else found).float()


def grades(prompts: list[Prompt], images: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """The same in the few grades of a judge, so that many images tie."""
    return (dense(prompts, images) * 3).round() / 3


def perfect(prompts: list[Prompt], images: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """A verdict that few images pass."""
    return (dense(prompts, images) >= _PERFECT).float()


def reached(prompts: list[Prompt], images: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """A goal that nearly all images have reached: the reward is saturated."""
    return dense(prompts, images).clamp(max=_REACHED) / _REACHED


def noisy(prompts: list[Prompt], images: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """`dense`, by a judge who is uncertain."""
    return dense(prompts, images) + _NOISE * torch.randn(len(prompts), generator=_CHANCE)


def warm(prompts: list[Prompt], images: UInt8[Tensor, "N 3 H W"]) -> Scores:
    """How much redder than blue the image is, place by place."""
    del prompts
    earned = (images[:, 0].float() - images[:, 2].float()) / 255
    places = torch.nn.functional.avg_pool2d(earned[:, None], 16)[:, 0]
    places /= places[0].numel()
    return Scores(places.sum(dim=(1, 2)), score_map=places)


def constant(prompts: list[Prompt], images: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """The same for all images."""
    del images
    return torch.full((len(prompts),), 0.5)


def of_prompt(prompts: list[Prompt], images: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """The same for all images of a prompt."""
    del images
    return torch.tensor([len(prompt.prompt) / 100 for prompt in prompts])


def chance(prompts: list[Prompt], images: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """A random number, another one each time."""
    del images
    return torch.rand(len(prompts), generator=_CHANCE)


def checksum(prompts: list[Prompt], images: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, " N"]:
    """A random number, always the same for the same image."""
    del prompts
    sums = [zlib.crc32(image.numpy().tobytes()) for image in images.cpu()]
    return torch.tensor(sums, dtype=torch.float64).div(2**32).float()


@cache
def _composition() -> Reward:
    config = CompositionConfig(
        kind="composition",
        weight=1.0,
        detector="glm_grpo.tiny.objects.detector:detect",
        clip_weights=None,
        threshold=0.8,
        images_at_once=64,
    )
    return config.build(torch.device("cpu"))
