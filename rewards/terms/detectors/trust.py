"""Notice a detector that does not work here, which scores alone do not tell.

On some machines and images, detectors found next to nothing without an error; see issues 15 of
djghosh13/geneval and 34 of FoundationVision/Infinity.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from rewards.detection import Detection
from rewards.images import ImageError, open_rgb, to_pixels
from rewards.terms.detectors.base import Detector
from rewards.types import RewardError

_WATCHED = 32
"""Images after which a detector that has found nothing is named."""
_MOST_NAMED = 3
"""Classes that an error names."""

_logger = logging.getLogger(__name__)


def read_test_image(path: str, *, kind: str) -> UInt8[Tensor, "3 H W"]:
    """Read an image whose content is known.

    Args:
        kind: First part of the config keys in errors.

    Raises:
        RewardError: It is no image.
    """
    try:
        return to_pixels(open_rgb(Path(path)))
    except (ImageError, OSError) as error:
        raise RewardError(
            f"{kind}.test_image {path} cannot be read ({error}); name an image that shows an "
            f"object of {kind}.test_class"
        ) from error


def refuse_blind(
    detector: Detector, path: str, label: str, *, threshold: float, name: str, kind: str
) -> None:
    """Refuse a detector that does not find an object in an image that shows one.

    Args:
        path: The image.
        label: Class of the object.
        threshold: The object must have a higher score.
        name: How the config names the detector.
        kind: As in `read_test_image`.

    Raises:
        RewardError: It finds none.
    """
    (found,) = detector.detect(read_test_image(path, kind=kind)[None], (label,))
    best = max((each.score for each in found), default=0.0)
    if best <= threshold:
        raise RewardError(
            f"{kind}.test_image {path}: {kind}.detector {name!r} finds no {label} there (best "
            f"score {best:.2f}); one must have a score above {kind}.threshold = {threshold:g}. If "
            "the image shows one, the detector does not work on this machine or for such images: "
            "try another device or detector; zero-shot detectors need a lower threshold"
        )


class EarlyWatch:
    """Watches whether a detector finds anything in the first images; warns once if not.

    Args:
        threshold: Score above which an object counts.
        name: How the config names the detector.
        kind: First part of the config keys.
    """

    def __init__(self, *, threshold: float, name: str, kind: str) -> None:
        self._threshold = threshold
        self._name = name
        self._kind = kind
        self._images = 0
        self._best = 0.0

    def see(self, found: Iterable[Sequence[Detection]]) -> None:
        """Look at the detections of further images."""
        if self._images >= _WATCHED or self._best > self._threshold:
            return
        for each in found:
            self._images += 1
            self._best = max([self._best, *(detection.score for detection in each)])
        if self._images >= _WATCHED and self._best <= self._threshold:
            _logger.warning(
                "%s: %s found none of the objects that prompts ask for in the first %d images "
                "(best score %.2f; above %g counts). Look at the images, in the gallery of a run: "
                "if they show such objects, the detector does not work here; test it on an image "
                "that you know with %s.test_image and test_class. If they do not, the model cannot "
                "draw them yet",
                self._kind,
                self._name,
                self._images,
                self._best,
                self._threshold,
                self._kind,
            )


def describe_unknown(label: str, known: Sequence[str], *, name: str, kind: str) -> str:
    """Why a class is refused, with the classes that may be meant.

    Args:
        known: Classes of the detector.
        name: How the config names the detector.
        kind: First part of the config keys.
    """
    near = difflib.get_close_matches(label, known, n=_MOST_NAMED)
    meant = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"use one of them, such as {', '.join(known[:_MOST_NAMED])}, or a detector of any "
        "class, such as google/owlv2-base-patch16-ensemble"
    )
    return f"{kind}.detector {name!r} knows {len(known)} classes, not this one; {meant}"
