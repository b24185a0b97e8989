"""Judge by GenEval's rule whether an image shows the objects that its prompt asks for.

Source: `evaluation/evaluate_images.py` of djghosh13/geneval, commit af4902f; 2310.11513.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewards.detection import Detection
from rewards.terms.composition_rows import (
    COUNTING,
    RELATIONS,
    Composition,
    Condition,
    Relation,
)

_CLEAR = 0.5
"""Component of a direction above which it is a relation; 60 degrees off the axis at most."""

_SMALLEST_OFFSET = 1e-3
"""Pixels; boxes whose reduced offset is less on both axes have no relation."""


@dataclass(frozen=True)
class Limits:
    """Limits of the rule, with the published values.

    Attributes:
        threshold: An object is found if its score is above this, > 0.
        counting_threshold: The same for prompts with the tag `counting`.
        max_objects: Largest number of objects of a class that count, the best ones.
        position_margin: Fraction of the boxes' sizes by which their centres must differ, >= 0.
    """

    threshold: float = 0.3
    counting_threshold: float = 0.9
    max_objects: int = 16
    position_margin: float = 0.1

    def threshold_of(self, tag: str) -> float:
        """Score above which an object is found in images of prompts with a tag."""
        return self.counting_threshold if tag == COUNTING else self.threshold


PUBLISHED = Limits()


@dataclass(frozen=True)
class Verdict:
    """Whether an image is right.

    Attributes:
        reasons: What is wrong with it, such as "asked 3 pizza, found 2"; empty if it is right.
    """

    reasons: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether every condition holds."""
        return not self.reasons


def judge(
    composition: Composition, detections: Sequence[Detection], limits: Limits = PUBLISHED
) -> Verdict:
    """Judge an image by the objects that were found in it.

    - The objects of a class are its detections with a score above the threshold, best first, at
      most `max_objects`.
    - include: the condition is about the `count` best objects of its class. Fewer are wrong, more
      are not.
    - colour: each of these objects must have it.
    - relation: each of these objects must be on this side of each object of the other condition,
      see `side`.
    - exclude: there must be fewer than `count` objects of the class.

    Args:
        detections: Of any class and score. Of equal scores, the first is better. Those that
            `colours_needed` names must have colours.
    """
    found = objects_by_class(composition, detections, limits)
    asked = [found[each.label][: each.count] for each in composition.include]
    reasons: list[str] = []
    for condition, objects in zip(composition.include, asked, strict=True):
        reasons += _wrong_number(condition, objects) or _wrong_colours(condition, objects)
        if condition.relation is None or condition.other is None:
            continue
        other, others = composition.include[condition.other], asked[condition.other]
        # Too few objects are a reason of their own. The rule also stops here if colours are wrong.
        if len(objects) == condition.count and len(others) == other.count:
            pairs = itertools.product(objects, others)
            reasons += _wrong_side(condition.relation, pairs, limits.position_margin)
    for condition in composition.exclude:
        number = len(found[condition.label])
        if number >= condition.count:
            fewer = f"fewer than {condition.count}" if condition.count > 1 else "for no"
            reasons.append(f"asked {fewer} {condition.label}, found {number}")
    return Verdict(tuple(reasons))


def objects_by_class(
    composition: Composition, detections: Sequence[Detection], limits: Limits = PUBLISHED
) -> dict[str, list[Detection]]:
    """Objects of each class that matters, best first; see `judge`."""
    threshold = limits.threshold_of(composition.tag)
    return {
        label: [each for each in best_objects(detections, label, limits) if each.score > threshold]
        for label in composition.classes
    }


def best_objects(detections: Sequence[Detection], label: str, limits: Limits) -> list[Detection]:
    """Detections of a class that count, best first; see `judge`."""
    return [detections[index] for index in _best_indices(detections, label, limits)]


def colours_needed(
    composition: Composition, detections: Sequence[Detection], limits: Limits = PUBLISHED
) -> tuple[int, ...]:
    """Indices of the detections whose colours a verdict or a score depends on, in ascending order.

    A verdict needs only those above the threshold, a score also worse ones.
    """
    needed: set[int] = set()
    for condition in composition.include:
        if condition.colour is not None:
            indices = _best_indices(detections, condition.label, limits)
            needed.update(indices[: condition.count])
    return tuple(sorted(needed))


def colour_of(detection: Detection) -> str:
    """The most probable colour of an object; of equal ones, the first."""
    colours = colours_of(detection)
    return max(colours, key=lambda colour: colours[colour])


def colours_of(detection: Detection) -> Mapping[str, float]:
    """Colours of an object that `colours_needed` names."""
    if not detection.colours:
        raise ValueError(f"{detection} needs colours, because its prompt asks for one")
    return detection.colours


def sides_between(one: Detection, other: Detection, *, margin: float) -> list[Relation]:
    """Sides of `other` on which `one` is; none, one or two."""
    return [each for each in RELATIONS if side(each, one, other, margin=margin) > _CLEAR]


def side(relation: Relation, one: Detection, other: Detection, *, margin: float) -> float:
    """How far `one` lies on a side of `other`, -1..1; above 0.5, the rule says that it is there.

    With the offset o from the centre of `other` to that of `one`, and their sizes s, per axis

        r = sign(o) max(|o| - margin (s_one + s_other), 0)

    it is the component of r / ||o|| towards this side, and 0 if |r| < 0.001 on both axes.
    """
    offsets = (
        (one.left + one.right - other.left - other.right) / 2,
        (one.top + one.bottom - other.top - other.bottom) / 2,
    )
    sizes = (
        one.right - one.left + other.right - other.left,
        one.bottom - one.top + other.bottom - other.top,
    )
    reduced = [
        math.copysign(max(abs(offset) - margin * size, 0.0), offset)
        for offset, size in zip(offsets, sizes, strict=True)
    ]
    if max(map(abs, reduced)) < _SMALLEST_OFFSET:
        return 0.0
    right, down = (each / math.hypot(*offsets) for each in reduced)
    match relation:
        case "left of":
            return -right
        case "right of":
            return right
        case "above":
            return -down
        case "below":
            return down


def _best_indices(detections: Sequence[Detection], label: str, limits: Limits) -> list[int]:
    of_class = [index for index, each in enumerate(detections) if each.label == label]
    # Sorting is stable: of equal scores, the first stays first.
    of_class.sort(key=lambda index: -detections[index].score)
    return of_class[: limits.max_objects]


def _wrong_number(condition: Condition, objects: Sequence[Detection]) -> list[str]:
    if len(objects) == condition.count:
        return []
    asked = condition.label if condition.count == 1 else f"{condition.count} {condition.label}"
    return [f"asked {asked}, found {len(objects) or 'none'}"]


def _wrong_colours(condition: Condition, objects: Sequence[Detection]) -> list[str]:
    if condition.colour is None:
        return []
    colours = Counter(map(colour_of, objects))
    if colours[condition.colour] == condition.count:
        return []
    asked = f"{condition.colour} {condition.label}"
    if condition.count == 1:
        return [f"asked {asked}, found {' '.join(colours)}"]
    found = " and ".join(f"{number} {colour}" for colour, number in colours.items())
    return [f"asked {condition.count} {asked}, found {found}"]


def _wrong_side(
    relation: Relation, pairs: Iterator[tuple[Detection, Detection]], margin: float
) -> list[str]:
    for one, other in pairs:
        sides = sides_between(one, other, margin=margin)
        if relation not in sides:
            found = f"{one.label} {' and '.join(sides)} {other.label}" if sides else "no clear side"
            return [f"asked {one.label} {relation} {other.label}, found {found}"]
    return []
