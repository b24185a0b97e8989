"""Score how far an image shows the objects that its prompt asks for, and where it earned that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rewards.detection import Detection
from rewards.score_map import ScoreBox
from rewards.terms.composition_rows import Composition, Condition, Relation
from rewards.terms.composition_rule import (
    PUBLISHED,
    Limits,
    best_objects,
    colour_of,
    colours_of,
    side,
)


@dataclass(frozen=True)
class DenseScore:
    """Score of an image with the parts of it that were earned in boxes.

    Attributes:
        value: 0..1.
        boxes: See `score_densely`. `value` less the sum of theirs belongs to the whole image.
    """

    value: float
    boxes: tuple[ScoreBox, ...]


def score_densely(
    composition: Composition, detections: Sequence[Detection], limits: Limits = PUBLISHED
) -> DenseScore:
    """Score an image by the objects that were found in it.

    The score is the mean over what the prompt asks for:

    - number, of each condition of `include`: the mean of p over its `count` best objects, where p
      = min(score / threshold, 1) says how far an object is there, and is 0 for a missing one;
    - colour, if it has one: the mean of p x (probability of the colour) over the same objects;
    - position, if it has one: the mean of p_one x p_other x clip((side + 1) / 1.5, 0, 1) over all
      pairs of its objects and the other condition's, see `side`;
    - `exclude`: 1 - p of the `count`-th best object of the class.

    The score is 1 only if the image is right, with all colours certain and no trace of what is
    excluded. Exactly on a threshold, or with a side of exactly 0.5, an object earns 1 here, but
    does not count by the rule.

    Boxes say what an object is like, and are compared with others of their `kind`. An object has
    them if its score is above `threshold`, or above the threshold of the tag if that is less:

    - `sure:I`: an object's part of the number of condition I. It differs between objects only
      where p does, below `counting_threshold`.
    - `colour:I`: its part of the colour of condition I.
    - `position:I-J` and `position:I-J:other`: half of the position of condition I relative to J
      at the objects of I, and half at those of J, if both are there in number.
    - no kind, and the value 0: further objects of the classes, for people.

    That objects are there, how many, what is excluded, and all parts of objects without boxes
    are credit of the whole image. An object has one box for each of its parts, all with the same
    text.

    Source: this project's; a dense form of `judge`.

    Args:
        detections: As in `judge`, with scores of 0..1.
    """
    threshold = limits.threshold_of(composition.tag)
    floor = min(threshold, limits.threshold)
    found = {
        label: [
            _Object(each, min(each.score / threshold, 1.0), has_box=each.score > floor)
            for each in best_objects(detections, label, limits)
        ]
        for label in composition.classes
    }
    parts = [*_included(composition, found, limits.position_margin)]
    parts += [_excluded(each, found[each.label]) for each in composition.exclude]
    boxes = [replace(box, value=box.value / len(parts)) for part in parts for box in part.boxes]
    for label, objects in found.items():
        counts = [each.count for each in composition.include if each.label == label]
        further = objects[max(counts, default=0) :]
        boxes += _boxes(further, [0.0] * len(further), kind="")
    return DenseScore(sum(part.value for part in parts) / len(parts), tuple(boxes))


@dataclass(frozen=True)
class _Object:
    """A detection.

    Attributes:
        presence: How far the object is there, 0..1; p above.
    """

    detection: Detection
    presence: float
    has_box: bool


@dataclass(frozen=True)
class _Part:
    """One of the values, 0..1, of which the score is the mean, and boxes that earned some of it."""

    value: float
    boxes: tuple[ScoreBox, ...] = ()


def _included(
    composition: Composition, found: Mapping[str, Sequence[_Object]], margin: float
) -> Iterator[_Part]:
    include = composition.include
    asked = [found[each.label][: each.count] for each in include]
    for index, (condition, objects) in enumerate(zip(include, asked, strict=True)):
        presences = [each.presence for each in objects]
        yield _mean(presences, objects, condition.count, kind=f"sure:{index}")
        if condition.colour is not None:
            values = [
                each.presence * colours_of(each.detection).get(condition.colour, 0.0)
                for each in objects
            ]
            yield _mean(values, objects, condition.count, kind=f"colour:{index}")
        if condition.relation is not None and condition.other is not None:
            ends = (objects, asked[condition.other])
            counts = (condition.count, include[condition.other].count)
            kind = f"position:{index}-{condition.other}"
            yield _position(condition.relation, ends, counts, margin=margin, kind=kind)


def _excluded(condition: Condition, objects: Sequence[_Object]) -> _Part:
    last = objects[condition.count - 1 : condition.count]
    return _Part(1.0 - sum(each.presence for each in last))


def _mean(values: Sequence[float], objects: Sequence[_Object], count: int, *, kind: str) -> _Part:
    """Mean over the objects that are asked for; missing ones have the value 0."""
    shares = [value / count for value in values]
    return _Part(sum(values) / count, tuple(_boxes(objects, shares, kind=kind)))


def _position(
    relation: Relation,
    ends: tuple[Sequence[_Object], Sequence[_Object]],
    counts: tuple[int, int],
    *,
    margin: float,
    kind: str,
) -> _Part:
    ones, others = ends
    pairs = [
        [
            one.presence * other.presence * _sidedness(relation, one, other, margin)
            for other in others
        ]
        for one in ones
    ]
    number = counts[0] * counts[1]
    value = sum(map(sum, pairs)) / number
    # With fewer objects, a box would also earn that there are others.
    if counts != tuple(sum(each.has_box for each in objects) for objects in ends):
        return _Part(value)
    boxes = _boxes(ones, [sum(row) / number / 2 for row in pairs], kind=kind)
    shares = [sum(column) / number / 2 for column in zip(*pairs, strict=True)]
    return _Part(value, (*boxes, *_boxes(others, shares, kind=f"{kind}:other")))


def _sidedness(relation: Relation, one: _Object, other: _Object, margin: float) -> float:
    """1 where the rule says that `one` is on this side, 0 on the opposite one."""
    found = side(relation, one.detection, other.detection, margin=margin)
    return min((found + 1) / 1.5, 1.0)


def _boxes(objects: Sequence[_Object], values: Sequence[float], *, kind: str) -> Iterator[ScoreBox]:
    for each, value in zip(objects, values, strict=True):
        if each.has_box:
            found = each.detection
            edges = (found.left, found.top, found.right, found.bottom)
            yield ScoreBox(value, *edges, text=_text(found), kind=kind)


def _text(detection: Detection) -> str:
    colour = f"{colour_of(detection)} " if detection.colours else ""
    return f"{colour}{detection.label} {f'{detection.score:.2f}'.removeprefix('0')}"
