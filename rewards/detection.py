"""Describe an object that a detector found in an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class Detection:
    """An object that a detector found in an image.

    Attributes:
        label: Class, by the name that prompts use.
        score: How sure the detector is, 0..1.
        left: Left edge of the box, in pixels from the image's left edge.
        top: Upper edge, in pixels from the image's upper edge.
        right: Right edge, at least `left`.
        bottom: Lower edge, at least `top`.
        mask: True where the object is; None if the detector gives only boxes.
        colours: Probability of each colour, 0..1; the most probable one, of equal ones the first,
            is the object's colour. None if not known.
    """

    label: str
    score: float
    left: float
    top: float
    right: float
    bottom: float
    mask: Bool[Tensor, "H W"] | None = None
    colours: Mapping[str, float] | None = None
