"""The detector of the world of shapes: a small stock RT-DETRv2, and the colours of what it finds.

For the reward term `composition`: `detector: "glm_grpo.tiny.objects.detector:detect"`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from glm_grpo.tiny.objects import world
from rewards.detection import Detection
from rewards.terms.detectors.base import Detector
from rewards.terms.detectors.loading import load_detector

_SAME_COLOUR = 20.0
"""Distance of two colours, in levels, at which one is e times less probable than an equal one."""
_GROUND_LEVELS = 60.0
"""Distance to the ground from which a pixel belongs to a shape, in levels."""


def detect(pixels: UInt8[Tensor, "N 3 H W"], classes: Sequence[str]) -> list[list[Detection]]:
    """Find circles, squares, triangles and stars, with the probability of each colour.

    Boxes on the same place are one shape; see `rewards.terms.detectors`.
    """
    found = _detector().detect(pixels, classes)
    return [
        [replace(each, colours=_colours(image, each)) for each in detections]
        for image, detections in zip(pixels, found, strict=True)
    ]


detect.classes = world.SHAPES  # type: ignore[attr-defined]


@functools.cache
def _detector() -> Detector:
    folder = str(files("glm_grpo.tiny.objects") / "weights" / "detector")
    return load_detector(folder, torch.device("cpu"), key="composition.detector")


def _colours(image: UInt8[Tensor, "3 H W"], found: Detection) -> dict[str, float]:
    """How similar a shape's mean colour is to each colour of the world; the sum is 1."""
    rows = slice(int(found.top), max(int(found.bottom), int(found.top) + 1))
    columns = slice(int(found.left), max(int(found.right), int(found.left) + 1))
    inside = image[:, rows, columns].float().flatten(1)
    distance = (inside - _levels([world.GROUND]).T).norm(dim=0)
    is_shape = distance > _GROUND_LEVELS
    if not is_shape.any():
        is_shape = distance >= distance.max()
    mean = inside[:, is_shape].mean(dim=1)
    distances = (_levels(list(world.COLOURS.values())) - mean).norm(dim=1)
    shares = (-distances / _SAME_COLOUR).softmax(dim=0)
    return dict(zip(world.COLOUR_NAMES, shares.tolist(), strict=True))


def _levels(colours: Sequence[tuple[int, ...]]) -> Float32[Tensor, "n 3"]:
    return torch.tensor(colours, dtype=torch.float32)
