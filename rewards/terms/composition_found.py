"""Say in words which objects were found in an image, to stand beside what was asked for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from rewards.detection import Detection
from rewards.terms.composition_rows import Composition, Condition, in_words
from rewards.terms.composition_rule import (
    PUBLISHED,
    Limits,
    colour_of,
    objects_by_class,
    sides_between,
)


def describe_found(
    composition: Composition, detections: Sequence[Detection], limits: Limits = PUBLISHED
) -> tuple[str, ...]:
    """Describe the objects of an image, in the words of `Composition.describe`.

    An image that shows what is asked for, and no more, has equal descriptions of both. Objects
    count as in `judge`. Colours and sides are said of the objects that the rule looks at, and only
    where the prompt asks for them: `red car`, `blue car`, `2 more car`, `dog right of car`, and
    `no cat`.

    Args:
        detections: As in `judge`.
    """
    found = objects_by_class(composition, detections, limits)
    said: list[str] = []
    for condition in composition.include:
        said += _said(composition, condition, found, limits.position_margin)
    included = {each.label for each in composition.include}
    for label in dict.fromkeys(each.label for each in composition.exclude):
        if label not in included:
            said.append(in_words(len(found[label]), label))
    # Conditions on the same objects.
    return tuple(dict.fromkeys(said))


def _said(
    composition: Composition,
    condition: Condition,
    found: dict[str, list[Detection]],
    margin: float,
) -> Iterator[str]:
    objects = found[condition.label]
    is_about_best = condition.colour is not None or condition.relation is not None
    if not is_about_best or not objects:
        yield in_words(len(objects), condition.label)
        return
    best = objects[: condition.count]
    colours = Counter(None if condition.colour is None else colour_of(each) for each in best)
    seen_from: list[str] = []
    if condition.other is not None and len(colours) == 1:
        other = composition.include[condition.other]
        others = found[other.label][: other.count]
        if (len(best), len(others)) == (condition.count, other.count):
            seen_from = _sides(condition, best, others, margin)
    for colour, number in colours.items():
        yield in_words(number, colour, condition.label, *seen_from)
    if len(objects) > len(best):
        yield f"{len(objects) - len(best)} more {condition.label}"


def _sides(
    condition: Condition, objects: Sequence[Detection], others: Sequence[Detection], margin: float
) -> list[str]:
    """On which side of the others all objects are, and of what; empty if there is none."""
    pairs = itertools.product(objects, others)
    sides = [sides_between(one, other, margin=margin) for one, other in pairs]
    common = [each for each in sides[0] if all(each in of_pair for of_pair in sides)]
    if condition.relation in common:
        common = [condition.relation]
    return [" and ".join(common), others[0].label] if common else []
