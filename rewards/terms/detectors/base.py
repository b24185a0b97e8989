"""Protocol of a detector, and how candidates become detections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.detection import Detection

SAME_PLACE = 0.6
"""Boxes with at least this intersection over union are one object."""


@dataclass(frozen=True)
class Limits:
    """Which candidates are returned.

    Attributes:
        floor: Only candidates with a higher score, 0..1.
        max_per_class: Only the best of each class in an image.
    """

    floor: float = 0.01
    max_per_class: int = 16


@runtime_checkable
class Detector(Protocol):
    """Finds objects of given classes in images."""

    def classes(self) -> tuple[str, ...] | None:
        """Classes that it knows; None if it can be asked for any."""
        ...

    def detect(
        self, pixels: UInt8[Tensor, "N 3 H W"], classes: Sequence[str]
    ) -> list[list[Detection]]:
        """Find objects in N images at once, at least one, on the device of `modules()`.

        Activations take much memory, because most detectors scale images to about 800 x 800 pixels.

        Args:
            pixels: RGB, 0..255, on any device.
            classes: Distinct names, at least one, each one of `classes()`. What a zero-shot
                detector finds of a class may depend on the others: ask for the same in all images
                that are compared.

        Returns:
            One list per image, best first; masks are on the CPU.
        """
        ...

    def modules(self) -> tuple[nn.Module, ...]:
        """Networks that may be moved between devices while the detector is idle; may be empty."""
        ...


def best_of_each_class(found: Iterable[Detection], limits: Limits) -> list[Detection]:
    """Sort detections, best first, and keep those within the limits."""
    kept: dict[str, list[Detection]] = {}
    for each in sorted(found, key=lambda detection: -detection.score):
        of_class = kept.setdefault(each.label, [])
        if each.score > limits.floor and len(of_class) < limits.max_per_class:
            of_class.append(each)
    return sorted(
        (each for of_class in kept.values() for each in of_class),
        key=lambda detection: -detection.score,
    )


def detections_of_boxes(
    scores: Float32[Tensor, "Q C"],
    boxes: Float32[Tensor, "Q 4"],
    labels: Sequence[str],
    *,
    asked: Sequence[str],
    limits: Limits,
) -> list[Detection]:
    """Detections of one image from a network that scores each box for each class.

    A box has its best class. Of boxes on the same place only the best stays, whatever the class;
    otherwise one object would count as several. Classes that were not asked for take part in this.

    Args:
        scores: 0..1, on the CPU.
        boxes: Left, top, right and bottom in pixels, cut to the image.
        labels: Class of each column of the scores.
    """
    from torchvision.ops import nms  # noqa: PLC0415

    best, columns = scores.max(dim=1)
    # What is cut to less than a pixel lies outside the image.
    is_inside = (boxes[:, 2:] - boxes[:, :2] >= 1).all(dim=1)
    chosen = ((best > limits.floor) & is_inside).nonzero().flatten()
    # torchvision removes boxes above its threshold, the rule those at it, too.
    below = torch.tensor(SAME_PLACE).nextafter(torch.tensor(0.0)).item()
    chosen = chosen[nms(boxes[chosen], best[chosen], below)]
    found = (
        Detection(labels[column], score, *box)
        for column, score, box in zip(
            columns[chosen].tolist(), best[chosen].tolist(), boxes[chosen].tolist(), strict=True
        )
    )
    wanted = set(asked)
    return best_of_each_class((each for each in found if each.label in wanted), limits)


def boxes_in_pixels(
    centred: Float32[Tensor, "N Q 4"], *, scale: tuple[int, int], size: tuple[int, int]
) -> Float32[Tensor, "N Q 4"]:
    """Convert centre, width and height to left, top, right and bottom, cut to the image.

    Args:
        centred: As fractions of `scale`.
        scale: Width and height in pixels of what the network saw.
        size: Width and height of the image, its upper left part.
    """
    centre, side = centred.split(2, dim=-1)
    corners = torch.cat([centre - side / 2, centre + side / 2], dim=-1)
    corners = corners * torch.tensor([*scale, *scale], device=corners.device)
    return corners.clamp(min=0).minimum(torch.tensor([*size, *size], device=corners.device))


def device_of(model: nn.Module) -> torch.device:
    """Where a network is now."""
    return next(model.parameters()).device


def prepare(
    processor: Any, pixels: UInt8[Tensor, "N 3 H W"], device: torch.device
) -> dict[str, Tensor]:
    """Run a model's own image processor on the model's device."""
    images = list(pixels.to(device))
    return dict(processor(images=images, return_tensors="pt", device=device))
