"""Call a detector of one's own, and check what it finds."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from rewards.detection import Detection
from rewards.process_defaults import defaults_kept
from rewards.terms.composition_rows import COLOURS
from rewards.terms.detectors.base import Limits, best_of_each_class
from rewards.types import RewardError
from rewards.user_functions import load_function

DetectingFunction = Callable[[Tensor, list[str]], Any]
"""Takes images UInt8 [N, 3, H, W] and class names; must return one list of detections per image."""


class FunctionDetector:
    """Objects that a function of one's own finds, of any class.

    What it finds of classes that it was not asked for is left out, and boxes are cut to the image.

    Args:
        function: Returned by `load_detecting_function`.
        name: How the config names it.
        key: Config key, for errors.
    """

    def __init__(self, function: DetectingFunction, limits: Limits, *, name: str, key: str) -> None:
        self._function = function
        self._limits = limits
        self._name = name
        self._key = key

    def classes(self) -> tuple[str, ...] | None:
        """Those that the function declares; None if it does not."""
        return declared_classes(self._function)

    @torch.no_grad()
    def detect(
        self, pixels: UInt8[Tensor, "N 3 H W"], classes: Sequence[str]
    ) -> list[list[Detection]]:
        """See `Detector.detect`.

        Raises:
            RewardError: It does not return one list of valid detections per image.
        """
        # Copies, because a function that works in place must not change the input of others.
        with defaults_kept(f"{self._key} {self._name!r}"):
            found = self._function(pixels.clone(), list(classes))
        if not _is_list(found) or len(found) != len(pixels):
            size = f" of {len(found)}" if _is_list(found) else ""
            raise RewardError(
                f"{self._key} {self._name!r}: returned {type(found).__name__}{size} for "
                f"{len(pixels)} images; it must return one list of rewards.Detection per image, "
                "which may be empty"
            )
        height, width = pixels.shape[2:]
        detections = [
            self._of_image(each, index, classes, height, width) for index, each in enumerate(found)
        ]
        edges = [max(each.right, each.bottom) for of_image in detections for each in of_image]
        if 0 < max(edges, default=0) <= 1:
            raise RewardError(
                f"{self._key} {self._name!r}: no box ends after pixel 1; boxes are in pixels: "
                "multiply fractions of the image by its width and height"
            )
        return [best_of_each_class(each, self._limits) for each in detections]

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty: networks that the function uses stay where it puts them."""
        return ()

    def _of_image(
        self, found: Any, index: int, classes: Sequence[str], height: int, width: int
    ) -> list[Detection]:
        if not _is_list(found) or not all(isinstance(each, Detection) for each in found):
            raise RewardError(
                f"{self._key} {self._name!r}: image {index}: {found!r:.100} is not a list of "
                "rewards.Detection"
            )
        for each in found:
            problem = _label_problem(each.label, classes)
            if problem is None and each.label in classes:
                problem = _problem(each, height, width)
            if problem is not None:
                raise RewardError(
                    f"{self._key} {self._name!r}: image {index}: {each.label}: {problem}"
                )
        return [_cut(each, height, width) for each in found if each.label in classes]


def load_detecting_function(name: str, folder: str | None, *, key: str) -> DetectingFunction:
    """Import `file.py:function` or `module:function`, as a custom reward is imported.

    Args:
        folder: Searched first; then the working folder.
        key: Config key of `name`, for errors.

    Raises:
        RewardError: It cannot be imported, or cannot be called with images and classes.
    """
    try:
        function: Any = load_function(name, folder)
    except RewardError as error:
        raise RewardError(f"{key}: {error}") from error
    # Some callables of C have no signature, which is a ValueError.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(function).bind(None, [])
        except TypeError as error:
            raise RewardError(
                f"{key} {name!r} ({error}) must be called with two arguments: "
                f"def {name.rpartition(':')[2]}(pixels, classes)"
            ) from error
    return function


def declared_classes(function: DetectingFunction) -> tuple[str, ...] | None:
    """Classes that a function says it can find, in its attribute `classes`; None without one."""
    classes = getattr(function, "classes", None)
    return None if classes is None else tuple(map(str, classes))


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _label_problem(label: object, classes: Sequence[str]) -> str | None:
    """Why an object would be overlooked, whatever it is."""
    if not isinstance(label, str):
        return f"its label is of type {type(label).__name__}; it must be the name of a class"
    near = [name for name in classes if _folded(name) == _folded(label) and label not in classes]
    if near:
        return f"asked for {near[0]!r}; return names of classes exactly as they are given"
    return None


def _folded(name: str) -> str:
    return name.strip().casefold()


def _problem(found: Detection, height: int, width: int) -> str | None:
    """What is wrong with a detection, with the rule and the remedy."""
    box = tuple(map(_plain, (found.left, found.top, found.right, found.bottom)))
    if not _is_probability(found.score):
        return f"its score is {found.score!r}; it must be a number from 0 to 1, such as a sigmoid"
    if not all(isinstance(edge, Real) and math.isfinite(edge) for edge in box):
        return f"its box is {box}; its edges must be finite numbers, in pixels"
    left, top, right, bottom = box
    if left > right or top > bottom:
        return (
            f"its box is {box}; it must be left, top, right, bottom, not left, top, width, height"
        )
    if left >= width or top >= height or right <= 0 or bottom <= 0:
        return (
            f"its box {box} is outside the image, {width} x {height}; boxes are in pixels of the "
            "image as it was given"
        )
    mask: object = found.mask
    if mask is not None and not (
        isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (height, width)
    ):
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        return (
            f"its mask is {what:.100}; it must be a torch.bool tensor of shape "
            f"({height}, {width}), the whole image, or None"
        )
    colours: object = found.colours
    if colours is not None and not (
        isinstance(colours, Mapping)
        and colours
        and all(isinstance(name, str) for name in colours)
        and all(map(_is_probability, colours.values()))
        and any(colours.values())
    ):
        return (
            f"its colours are {colours!r:.100}; they must be probabilities from 0 to 1 by name, "
            "at least one above 0, such as {'red': 0.9, 'blue': 0.1}, or None"
        )
    for name in found.colours or ():
        if name not in COLOURS and _folded(name) in COLOURS:
            return f"its colour {name!r} must be written {_folded(name)!r}"
    return None


def _plain(number: object) -> Any:
    """Python's number for that of a network, which may be a tensor."""
    return number.item() if isinstance(number, Tensor) and number.ndim == 0 else number


def _is_probability(number: object) -> bool:
    value = _plain(number)
    return isinstance(value, Real) and 0 <= float(value) <= 1


def _cut(found: Detection, height: int, width: int) -> Detection:
    return replace(
        found,
        score=float(found.score),
        left=max(float(found.left), 0.0),
        top=max(float(found.top), 0.0),
        right=min(float(found.right), float(width)),
        bottom=min(float(found.bottom), float(height)),
        mask=None if found.mask is None else found.mask.cpu(),
        colours=None
        if found.colours is None
        else {name: float(part) for name, part in found.colours.items()},
    )
