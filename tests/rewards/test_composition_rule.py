from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import rewards
from rewards.detection import Detection
from rewards.terms.composition_rows import COLOURS, RELATIONS, Composition, Condition
from rewards.terms.composition_rule import (
    Limits,
    Relation,
    Verdict,
    colours_needed,
    judge,
    side,
)


def square(label: str, x: float, y: float, score: float = 0.95, colour: str = "") -> Detection:
    """An object of 20 x 20 pixels around a point, of one colour."""
    colours = {"blue": 0.25, "red": 0.25, colour: 0.5} if colour else None
    return Detection(label, score, x - 10.0, y - 10.0, x + 10.0, y + 10.0, colours=colours)


DOGS = [square("dog", 20, 20, 0.5), square("dog", 80, 20, 0.4), square("dog", 20, 80, 0.35)]
CAR = square("car", 80, 80)


@pytest.mark.parametrize(
    ("composition", "detections", "reasons"),
    [
        (Composition((Condition("dog", 1),)), DOGS, []),
        (Composition((Condition("dog", 3),)), DOGS, []),
        (Composition((Condition("dog", 4),)), DOGS, ["asked 4 dog, found 3"]),
        (Composition((Condition("cat", 1),)), DOGS, ["asked cat, found none"]),
        (Composition((Condition("cat", 2),)), DOGS, ["asked 2 cat, found none"]),
        # At the threshold is not above it.
        (
            Composition((Condition("car", 1),)),
            [replace(CAR, score=0.3)],
            ["asked car, found none"],
        ),
        # Counted at 0.9 instead of 0.3.
        (
            Composition((Condition("dog", 2),), tag="counting"),
            [CAR, replace(CAR, label="dog"), *DOGS],
            ["asked 2 dog, found 1"],
        ),
        (Composition((Condition("car", 1),), (Condition("dog", 4),)), [CAR, *DOGS], []),
        (
            Composition((Condition("car", 1),), (Condition("dog", 3),)),
            [CAR, *DOGS],
            ["asked fewer than 3 dog, found 3"],
        ),
        (
            Composition((Condition("cat", 1), Condition("dog", 4))),
            DOGS,
            ["asked cat, found none", "asked 4 dog, found 3"],
        ),
    ],
    ids=[
        "one",
        "three",
        "too few",
        "none",
        "none of two",
        "at the threshold",
        "counting",
        "few enough",
        "too many",
        "two reasons",
    ],
)
def test_numbers_are_those_of_objects_above_the_threshold(
    composition: Composition, detections: list[Detection], reasons: list[str]
) -> None:
    found = judge(composition, detections)
    assert found == Verdict(tuple(reasons))
    assert found.is_right == (not reasons)


def test_objects_beyond_the_largest_number_do_not_count() -> None:
    crowd = [square("dog", 10 + index, 10) for index in range(17)]
    composition = Composition((Condition("dog", 17),))
    assert judge(composition, crowd).reasons == ("asked 17 dog, found 16",)
    assert judge(composition, crowd, Limits(max_objects=17)).is_right
    assert judge(Composition((Condition("dog", 1),), (Condition("dog", 17),)), crowd).is_right


@pytest.mark.parametrize(
    ("count", "colours", "reasons"),
    [
        (1, ["green"], []),
        (1, ["red"], ["asked green car, found red"]),
        # Only the best objects are looked at.
        (1, ["green", "red"], []),
        (1, ["red", "green"], ["asked green car, found red"]),
        (2, ["green", "green", "red"], []),
        (2, ["red", "green"], ["asked 2 green car, found 1 red and 1 green"]),
        (2, ["red", "red"], ["asked 2 green car, found 2 red"]),
        # Without enough objects, colours are not looked at.
        (2, ["red"], ["asked 2 car, found 1"]),
    ],
)
def test_each_of_the_best_objects_must_have_the_colour(
    count: int, colours: list[str], reasons: list[str]
) -> None:
    cars = [square("car", 10, 10, 0.9 - i / 10, colour) for i, colour in enumerate(colours)]
    composition = Composition((Condition("car", count, "green"),))
    # Their order is that of the scores.
    assert judge(composition, cars[::-1]).reasons == tuple(reasons)


def test_of_equal_scores_and_colours_the_first_is_best() -> None:
    composition = Composition((Condition("car", 1, "red"),))
    red, blue = (square("car", 10, 10, 0.5, colour) for colour in ("red", "blue"))
    assert judge(composition, [red, blue]).is_right
    assert not judge(composition, [blue, red]).is_right
    even = replace(red, colours={"red": 0.5, "blue": 0.5})
    assert judge(composition, [even]).is_right
    assert not judge(composition, [replace(even, colours={"blue": 0.5, "red": 0.5})]).is_right


def test_colours_are_needed_of_the_best_objects_that_must_have_one() -> None:
    composition = Composition(
        (Condition("car", 2, "red"), Condition("dog", 1), Condition("car", 1))
    )
    cars = [square("car", 10, 10, score) for score in (0.2, 0.9, 0.1, 0.9, 0.2)]
    assert colours_needed(composition, [DOGS[0], *cars]) == (2, 4)
    assert colours_needed(composition, [DOGS[0], *cars[:1], *cars[2:]]) == (1, 3)
    assert colours_needed(composition, cars, Limits(max_objects=1)) == (1,)
    with pytest.raises(ValueError, match=r"Detection\(label='car'.* needs colours"):
        judge(composition, cars)


@pytest.mark.parametrize(
    ("x", "y", "right", "down"),
    [
        # Both are 20 pixels wide: a margin of 4 pixels.
        (40, 0, 36 / 40, 0),
        (-40, 0, -36 / 40, 0),
        (0, 40, 0, 36 / 40),
        (30, -40, 26 / 50, -36 / 50),
        (-4, 40, 0, 36 / 1616**0.5),
        (3, -4, 0, 0),
        (4.0009, 0, 0, 0),
        (4.0011, 0, 0.0011 / 4.0011, 0),
        (0, 0, 0, 0),
    ],
)
def test_sides_are_offsets_less_a_margin_in_relation_to_the_distance(
    x: float, y: float, right: float, down: float
) -> None:
    one, other = square("dog", 60 + x, 60 + y), square("car", 60, 60)
    expected = {"left of": -right, "right of": right, "above": -down, "below": down}
    found = {each: side(each, one, other, margin=0.1) for each in RELATIONS}
    assert found == pytest.approx(expected)


ON = {"left of": (20, 60), "right of": (100, 60), "above": (60, 20), "below": (60, 100)}


@pytest.mark.parametrize("relation", RELATIONS)
def test_objects_must_be_on_the_side_that_is_asked_for(relation: Relation) -> None:
    composition = Composition((Condition("car", 1), Condition("dog", 1, None, relation, 0)))
    car = square("car", 60, 60)
    for there, place in ON.items():
        reasons = judge(composition, [square("dog", *place), car]).reasons
        wrong = f"asked dog {relation} car, found dog {there} car"
        assert reasons == (() if there == relation else (wrong,))
    # In the middle; and 8 pixels to the right, of which the margin leaves exactly half.
    for x in (60, 68):
        reasons = judge(composition, [square("dog", x, 60), car]).reasons
        assert reasons == (f"asked dog {relation} car, found no clear side",)


def test_an_object_may_be_on_two_sides() -> None:
    car, dog = square("car", 60, 60), square("dog", 110, 110)
    asked = {
        relation: Composition((Condition("dog", 1, None, relation, 1), Condition("car", 1)))
        for relation in RELATIONS
    }
    assert judge(asked["right of"], [car, dog]).is_right
    assert judge(asked["below"], [car, dog]).is_right
    reasons = ("asked dog above car, found dog right of and below car",)
    assert judge(asked["above"], [car, dog]).reasons == reasons


def test_every_pair_must_be_on_the_side() -> None:
    composition = Composition((Condition("dog", 2, None, "left of", 1), Condition("car", 2)))
    dogs = [square("dog", 20, 60), square("dog", 60, 60)]
    left, right = square("car", 30, 60), square("car", 110, 60)
    further = replace(right, left=115.0)
    assert judge(composition, [*dogs, right, further]).is_right
    reasons = ("asked dog left of car, found dog right of car",)
    assert judge(composition, [*dogs, right, left]).reasons == reasons
    # The third best car does not matter.
    assert judge(composition, [*dogs, right, further, replace(left, score=0.4)]).is_right
    # Nor does a side, as long as there are too few.
    assert judge(composition, [*dogs, left]).reasons == ("asked 2 car, found 1",)
    assert judge(composition, [dogs[1], left, left]).reasons == ("asked 2 dog, found 1",)


def test_detections_are_part_of_the_public_names() -> None:
    assert rewards.Detection is Detection


# The rule once more, from its description: all pairs at once, and tables instead of objects.

CLASSES = ("dog", "car", "cup")


def published(composition: Composition, detections: list[Detection]) -> bool:
    table = np.array([[d.left, d.top, d.right, d.bottom, d.score] for d in detections])
    table = table.reshape(-1, 5)
    labels = np.array([d.label for d in detections], dtype=object)
    limit = 0.9 if composition.tag == "counting" else 0.3

    def rows_of(label: str) -> np.ndarray:
        order = np.argsort(-table[:, 4], kind="stable")
        return order[(labels[order] == label) & (table[order, 4] > limit)][:16]

    held: list[np.ndarray | None] = [None] * len(composition.include)
    for index, condition in enumerate(composition.include):
        rows = rows_of(condition.label)[: condition.count]
        is_held = len(rows) == condition.count
        if is_held and condition.colour:
            names = [list(detections[row].colours or {}) for row in rows]
            chances = [list((detections[row].colours or {}).values()) for row in rows]
            chosen = [each[int(np.argmax(p))] for each, p in zip(names, chances, strict=True)]
            is_held = chosen.count(condition.colour) >= condition.count
        held[index] = rows if is_held else None
    is_right = all(rows is not None for rows in held)
    for condition, rows in zip(composition.include, held, strict=True):
        if condition.relation is None:
            continue
        others = held[condition.other]
        is_right = (
            is_right
            and rows is not None
            and others is not None
            and bool(_relations(table[rows], table[others])[condition.relation].all())
        )
    crowds = [len(rows_of(each.label)) >= each.count for each in composition.exclude]
    return is_right and not any(crowds)


def _relations(ones: np.ndarray, others: np.ndarray) -> dict[str, np.ndarray]:
    corners = [boxes[:, :4].reshape(-1, 2, 2) for boxes in (ones, others)]
    (centre_a, centre_b), (size_a, size_b) = zip(
        *((each.mean(axis=1), each[:, 1] - each[:, 0]) for each in corners), strict=True
    )
    offset = centre_a[:, None] - centre_b[None]
    shrunk = np.abs(offset) - 0.1 * (size_a[:, None] + size_b[None])
    reduced = np.where(shrunk > 0, shrunk, 0) * np.sign(offset)
    is_far = (np.abs(reduced) >= 0.001).any(axis=2)
    length = np.sqrt((offset**2).sum(axis=2))
    d = np.where(is_far[..., None], reduced / np.where(length > 0, length, 1)[..., None], 0)
    right, down = d[..., 0], d[..., 1]
    return {
        "left of": right < -0.5,
        "right of": right > 0.5,
        "above": down < -0.5,
        "below": down > 0.5,
    }


def draw_row(tag: str, draw: random.Random) -> Composition:
    """A row as GenEval writes those of a tag, or one that is richer."""
    one, two = draw.sample(CLASSES, 2)
    first, second = draw.choices(COLOURS[:3], k=2)
    relation, count = draw.choice(RELATIONS), draw.choice((1, 1, 2))
    match tag:
        case "single_object":
            include = (Condition(one, 1),)
        case "two_object":
            include = (Condition(one, 1), Condition(two, 1))
        case "counting":
            wanted = draw.randint(2, 5)
            return Composition((Condition(one, wanted),), (Condition(one, wanted + 1),), tag)
        case "colors":
            include = (Condition(one, 1, first),)
        case "color_attr":
            include = (Condition(one, 1, first), Condition(two, 1, second))
        case "position":
            include = (Condition(one, count), Condition(two, 1, None, relation, 0))
        case _:
            # In no row of GenEval: all at once, and a position that names a later condition.
            include = (Condition(one, count, first, relation, 1), Condition(two, 1))
            return Composition(include, (Condition(draw.choice(CLASSES), 3),))
    return Composition(include, (), tag)


def draw_objects(composition: Composition, draw: random.Random) -> list[Detection]:
    """Objects on a coarse grid: on the edges, without area, with equal centres, with equal scores.

    Half of what is asked for is planted, or hardly any image would be right.
    """
    labels = [
        each.label
        for each in composition.include
        for _ in range(each.count)
        if draw.random() < 0.95
    ]
    wanted = [each.colour for each in composition.include if each.colour]
    number = 40 if draw.random() < 0.04 else draw.choice((0, 0, 1, 1, 2, 6))
    further = draw.choices(CLASSES, k=number)
    found: list[Detection] = []
    for label in draw.sample([*labels, *further], len(labels) + len(further)):
        width, height = (draw.choice((0.0, 10.0, 20.0, 40.0)) for _ in range(2))
        x, y = (draw.choice((0.0, 3.0, 4.0, 10.0, 20.0, 40.0, 64.0)) for _ in range(2))
        if found and draw.random() < 0.1:
            last = found[-1]
            x, y = (last.left + last.right - width) / 2, (last.top + last.bottom - height) / 2
        colour = draw.choice((*COLOURS[:3], *wanted))
        chances = {each: 0.4 * draw.random() for each in COLOURS[:3]} | {colour: 0.4}
        score = draw.choice((0.1, 0.3, 0.6, 0.9, draw.random(), *[0.91, 0.95] * 5))
        found.append(Detection(label, score, x, y, x + width, y + height, colours=chances))
    return found


def test_verdict_equals_the_published_rule() -> None:
    draw = random.Random(57)
    tags = ("single_object", "two_object", "counting", "colors", "position", "color_attr", "")
    right: Counter[str] = Counter()
    for index in range(5000):
        composition = draw_row(tags[index % len(tags)], draw)
        detections = draw_objects(composition, draw)
        expected = published(composition, detections)
        assert judge(composition, detections).is_right == expected, (composition, detections)
        right[composition.tag] += expected
    # Of each tag, enough images are right and enough are wrong for the test to say something.
    assert all(80 < right[tag] < 640 for tag in tags if tag), right
    assert right[""] > 10
