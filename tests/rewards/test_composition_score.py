from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.detection import Detection
from rewards.score_map import ScoreBox
from rewards.terms.composition_rows import (
    RELATIONS,
    Composition,
    Condition,
    Relation,
    read_composition,
)
from rewards.terms.composition_rule import Limits, best_objects, judge
from rewards.terms.composition_score import DenseScore, score_densely


def square(
    label: str, score: float, x: float = 10.0, y: float = 10.0, **chances: float
) -> Detection:
    """An object of 20 x 20 pixels around a point."""
    edges = (x - 10.0, y - 10.0, x + 10.0, y + 10.0)
    return Detection(label, score, *edges, colours=chances or None)


Box = tuple[str, float, str]
"""Kind, value, text."""


def described(score: DenseScore) -> list[Box]:
    return [(box.kind, pytest.approx(box.value), box.text) for box in score.boxes]


@pytest.mark.parametrize(
    ("scores", "value", "boxes"),
    [
        ([0.95, 0.5], 1.0, [("sure:0", 0.5, "dog .95"), ("sure:0", 0.5, "dog .50")]),
        # Half of the threshold of 0.3: half an object, which is credit of the image.
        ([0.15, 0.95], 0.75, [("sure:0", 0.5, "dog .95")]),
        ([0.95], 0.5, [("sure:0", 0.5, "dog .95")]),
        ([], 0.0, []),
        # More are allowed, and shown without a value.
        (
            [0.95, 0.9, 0.8, 0.2],
            1.0,
            [
                ("sure:0", 0.5, "dog .95"),
                ("sure:0", 0.5, "dog .90"),
                ("", 0.0, "dog .80"),
            ],
        ),
    ],
)
def test_numbers_earn_how_far_the_best_objects_are_there(
    scores: list[float], value: float, boxes: list[Box]
) -> None:
    found = score_densely(
        Composition((Condition("dog", 2),)),
        [square("cat", 0.99), *(square("dog", score) for score in scores)],
    )
    assert found.value == pytest.approx(value)
    assert described(found) == boxes


@pytest.mark.parametrize(
    ("scores", "value", "boxes"),
    [
        # Number: (1 + 0.45 / 0.9) / 2 = 0.75. Exclude: 1 - 0.27 / 0.9 = 0.7.
        ([0.95, 0.45, 0.27], 0.725, [("sure:0", 0.25, "dog .95"), ("sure:0", 0.125, "dog .45")]),
        # Exclude: 1 - 0.36 / 0.9 = 0.6.
        (
            [0.95, 0.45, 0.36],
            0.675,
            [
                ("sure:0", 0.25, "dog .95"),
                ("sure:0", 0.125, "dog .45"),
                ("", 0.0, "dog .36"),
            ],
        ),
        ([0.95, 0.95], 1.0, [("sure:0", 0.25, "dog .95")] * 2),
        ([0.95, 0.95, 0.95], 0.5, [("sure:0", 0.25, "dog .95")] * 2 + [("", 0.0, "dog .95")]),
    ],
)
def test_counting_has_its_own_threshold_below_which_boxes_differ(
    scores: list[float], value: float, boxes: list[Box]
) -> None:
    composition = Composition((Condition("dog", 2),), (Condition("dog", 3),), "counting")
    found = score_densely(composition, [square("dog", score) for score in scores])
    assert found.value == pytest.approx(value)
    assert described(found) == boxes


def test_boxes_follow_a_counting_threshold_below_the_usual_one() -> None:
    composition, dog = Composition((Condition("dog", 1),), (), "counting"), square("dog", 0.2)
    limits = Limits(threshold=0.3, counting_threshold=0.1)
    found = score_densely(composition, [dog], limits)
    assert (found.value, described(found)) == (1.0, [("sure:0", 1.0, "dog .20")])


def test_colours_earn_their_probability_at_each_object() -> None:
    composition = Composition((Condition("car", 2, "red"),))
    cars = [
        square("car", 0.9, 20.0, red=0.25, blue=0.75),
        square("car", 0.8, 40.0, red=0.5, blue=0.0),
    ]
    found = score_densely(composition, cars)
    # Number 1, colour (0.25 + 0.5) / 2 = 0.375.
    assert found.value == pytest.approx(0.6875)
    assert described(found) == [
        ("sure:0", 0.25, "blue car .90"),
        ("sure:0", 0.25, "red car .80"),
        ("colour:0", 0.0625, "blue car .90"),
        ("colour:0", 0.125, "red car .80"),
    ]
    assert found.boxes[2] == ScoreBox(0.0625, 10.0, 0.0, 30.0, 20.0, "blue car .90", "colour:0")
    # 0.15 is half there: 0.5 and 0.5 * 0.5 of two, without a box. A colour not named has 0.
    dim = score_densely(composition, [square("car", 0.15, red=0.5), square("car", 0.9, green=1.0)])
    assert dim.value == pytest.approx((0.75 + 0.125) / 2)
    assert described(dim) == [
        ("sure:0", 0.25, "green car .90"),
        ("colour:0", 0.0, "green car .90"),
    ]


@pytest.mark.parametrize(
    ("x", "value"),
    [
        # 36 / 40 of the distance to the right: clear.
        (100.0, 1.0),
        # 1 / 5 of it: (0.2 + 1) / 1.5.
        (65.0, 0.8),
        (60.0, 1 / 1.5),
        (55.0, 0.8 / 1.5),
        # 36 / 40 to the left: a failed position earns (1 - 0.9) / 1.5.
        (20.0, 0.1 / 1.5),
    ],
)
def test_positions_earn_how_far_an_object_is_on_the_side(x: float, value: float) -> None:
    composition = Composition((Condition("car", 1), Condition("dog", 1, None, "right of", 0)))
    objects = [square("dog", 0.9, x, 60.0), square("car", 0.8, 60.0, 60.0)]
    found = score_densely(composition, objects)
    assert found.value == pytest.approx((1 + 1 + value) / 3)
    assert described(found) == [
        ("sure:0", 1 / 3, "car .80"),
        ("sure:1", 1 / 3, "dog .90"),
        ("position:1-0", value / 6, "dog .90"),
        ("position:1-0:other", value / 6, "car .80"),
    ]


def test_positions_are_credit_of_the_image_unless_both_ends_are_there_in_number() -> None:
    composition = Composition((Condition("dog", 2, None, "left of", 1), Condition("car", 1)))
    near, far = square("dog", 0.9, 20.0, 60.0), square("dog", 0.8, 60.0, 60.0)
    car = square("car", 0.7, 55.0, 60.0)
    found = score_densely(composition, [near, far, car])
    # The first dog is clearly left of the car; the second one is on the other side, by 1 / 5.
    pairs = (1.0, 0.8 / 1.5)
    assert found.value == pytest.approx((1 + sum(pairs) / 2 + 1) / 3)
    assert [each for each in described(found) if each[0].startswith("position")] == [
        ("position:0-1", pairs[0] / 12, "dog .90"),
        ("position:0-1", pairs[1] / 12, "dog .80"),
        ("position:0-1:other", sum(pairs) / 12, "car .70"),
    ]
    for objects, number, position in [
        ([near, car], (0.5, 1), 0.5),
        ([near, replace(far, score=0.15), car], (0.75, 1), (pairs[0] + 0.5 * pairs[1]) / 2),
        ([near, far, replace(car, score=0.15)], (1, 0.5), 0.5 * sum(pairs) / 2),
        ([near, far], (1, 0), 0),
    ]:
        found = score_densely(composition, objects)
        assert found.value == pytest.approx((sum(number) + position) / 3)
        assert {box.kind for box in found.boxes} <= {"sure:0", "sure:1"}


def test_objects_beyond_the_largest_number_do_not_count() -> None:
    crowd = [square("dog", 0.9) for _ in range(20)]
    many = Composition((Condition("dog", 20),))
    assert score_densely(many, crowd).value == pytest.approx(16 / 20)
    assert score_densely(many, crowd, Limits(max_objects=20)).value == 1.0
    assert (
        score_densely(Composition((Condition("dog", 1),), (Condition("dog", 17),)), crowd).value
        == 1
    )


CLASSES = ("dog", "car", "cup")


Row = dict[str, Any]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Conditions on different classes, each in a colour or on a side, or not."""
    labels = draw(st.permutations(CLASSES))[: draw(st.integers(1, 3))]
    include: list[Row] = []
    for index, label in enumerate(labels):
        condition: Row = {"class": label, "count": draw(st.sampled_from([1, 1, 2, 3, 16]))}
        condition["color"] = draw(st.sampled_from([None, "red", "blue"]))
        if len(labels) > 1 and draw(st.booleans()):
            other = (index + draw(st.integers(1, len(labels) - 1))) % len(labels)
            condition["position"] = [draw(st.sampled_from(RELATIONS)), other]
        include.append(condition)
    counts = {each["class"]: each["count"] for each in include}
    excluded = draw(st.lists(st.sampled_from(CLASSES), max_size=2, unique=True))
    exclude = [
        {"class": label, "count": counts.get(label, 0) + draw(st.integers(1, 2))}
        for label in excluded
    ]
    tag = draw(st.sampled_from(["", "counting"]))
    return {"include": include, "exclude": exclude, "tag": tag}


CHANCES = st.floats(0, 1)


@st.composite
def objects(draw: st.DrawFn, label: str, scores: st.SearchStrategy[float] = CHANCES) -> Detection:
    left, top = (draw(st.floats(0, 100)) for _ in range(2))
    width, height = (draw(st.floats(0, 50)) for _ in range(2))
    edges = (left, top, left + width, top + height)
    return Detection(label, draw(scores), *edges, colours={"red": draw(CHANCES), "blue": 0.5})


@st.composite
def images(draw: st.DrawFn) -> tuple[Row, list[Detection]]:
    """What is asked, and the objects of an image."""
    return draw(rows()), draw(st.lists(st.sampled_from(CLASSES).flatmap(objects), max_size=8))


@given(images())
def test_scores_and_parts_are_between_zero_and_one(
    image: tuple[Row, list[Detection]],
) -> None:
    score = score_densely(read(image[0]), image[1])
    assert 0 <= score.value <= 1
    assert all(box.value >= 0 for box in score.boxes)
    assert sum(box.value for box in score.boxes) <= score.value + 1e-6


@st.composite
def whole_images(draw: st.DrawFn) -> tuple[Row, list[Detection]]:
    """Images with a box for everything that is asked, and further objects."""
    row, sure = draw(rows()), st.floats(0.3, 1, exclude_min=True)
    wanted = [
        draw(objects(each["class"], sure)) for each in row["include"] for _ in range(each["count"])
    ]
    further = draw(st.lists(st.sampled_from(CLASSES).flatmap(objects), max_size=3))
    return row, [*further, *wanted]


@given(whole_images())
def test_boxes_add_up_to_all_but_what_is_excluded(
    image: tuple[Row, list[Detection]],
) -> None:
    composition, detections = read(image[0]), image[1]
    score = score_densely(composition, detections)
    include = composition.include
    values = len(composition.exclude) + sum(
        1 + (each.colour is not None) + (each.relation is not None) for each in include
    )
    threshold = 0.9 if composition.tag == "counting" else 0.3
    absence = 0.0
    for each in composition.exclude:
        scores = [d.score for d in best_objects(detections, each.label, Limits())]
        trace = scores[each.count - 1] if len(scores) >= each.count else 0.0
        absence += 1 - min(trace / threshold, 1)
    of_boxes = sum(box.value for box in score.boxes)
    assert of_boxes + absence / values == pytest.approx(score.value, abs=1e-6)


@given(images(), st.data())
def test_score_rises_with_each_object_that_is_added_or_surer(
    image: tuple[Row, list[Detection]], data: st.DataObject
) -> None:
    composition, detections = read(image[0]), image[1]
    before = score_densely(composition, detections).value
    condition = data.draw(st.sampled_from(composition.include))
    best = best_objects(detections, condition.label, Limits())[: condition.count]
    threshold = 0.9 if composition.tag == "counting" else 0.3
    if len(best) < condition.count:
        new = data.draw(objects(condition.label, st.floats(1e-3, 1)))
        assert score_densely(composition, [*detections, new]).value > before
    if best:
        chosen = data.draw(st.sampled_from(best))
        surer = data.draw(st.floats(chosen.score, 1))
        after = score_densely(composition, exchanged(detections, chosen, score=surer)).value
        assert after >= before - 1e-9
        if min(surer, threshold) > chosen.score + 1e-3:
            assert after > before


@given(images(), st.data())
def test_score_rises_with_the_probability_of_each_colour(
    image: tuple[Row, list[Detection]], data: st.DataObject
) -> None:
    composition, detections = read(image[0]), image[1]
    red = replace(composition.include[0], colour="red")
    composition = replace(composition, include=(red, *composition.include[1:]))
    for chosen in best_objects(detections, red.label, Limits())[: red.count]:
        chance = chosen.colours["red"]
        more = data.draw(st.floats(chance, 1))
        after = exchanged(detections, chosen, colours=chosen.colours | {"red": more})
        rise = (
            score_densely(composition, after).value - score_densely(composition, detections).value
        )
        assert rise >= -1e-9
        assert rise > 0 or chosen.score < 1e-3 or more < chance + 1e-3


TOWARDS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}


@given(
    st.lists(objects("dog", st.floats(0.1, 1)), min_size=1, max_size=3),
    st.lists(objects("car"), min_size=1, max_size=2),
    st.sampled_from(RELATIONS),
    st.floats(0, 200),
    st.integers(0, 2),
)
def test_score_rises_when_an_object_moves_to_its_side(
    dogs: list[Detection], cars: list[Detection], relation: Relation, way: float, index: int
) -> None:
    asked = (Condition("dog", len(dogs), None, relation, 1), Condition("car", len(cars)))
    composition, chosen = Composition(asked), dogs[index % len(dogs)]
    x, y = (direction * way for direction in TOWARDS[relation])
    moved = exchanged(
        dogs,
        chosen,
        left=chosen.left + x,
        right=chosen.right + x,
        top=chosen.top + y,
        bottom=chosen.bottom + y,
    )
    before = score_densely(composition, [*dogs, *cars]).value
    assert score_densely(composition, [*moved, *cars]).value >= before - 1e-9


def test_score_rises_step_by_step_as_an_object_moves_to_its_side() -> None:
    composition = Composition((Condition("dog", 1, None, "left of", 1), Condition("car", 1)))
    car = square("car", 0.9, 100.0, 100.0)
    ways = [190.0, 150.0, 130.0, 110.0, 104.0, 96.0, 93.0]
    values = [score_densely(composition, [square("dog", 0.9, x, 80.0), car]).value for x in ways]
    assert values == sorted(values)
    # Between the margins of 4 pixels, nothing changes.
    assert len(set(values)) == len(values) - 1


@given(images(), st.data())
def test_score_rises_as_excluded_objects_fade(
    image: tuple[Row, list[Detection]], data: st.DataObject
) -> None:
    composition, detections = read(image[0]), image[1]
    before = score_densely(composition, detections).value
    threshold = 0.9 if composition.tag == "counting" else 0.3
    for condition in composition.exclude:
        last = best_objects(detections, condition.label, Limits())[condition.count - 1 :][:1]
        for chosen in last:
            fainter = data.draw(st.floats(0, chosen.score))
            after = exchanged(detections, chosen, score=fainter)
            assert score_densely(composition, after).value >= before - 1e-9
            without = [each for each in detections if each is not chosen]
            gone = score_densely(composition, without).value
            next_one = best_objects(without, condition.label, Limits())[condition.count - 1 :]
            if not next_one and min(chosen.score, threshold) > 1e-3:
                assert gone > before


def read(row: Row) -> Composition:
    composition = read_composition(row)
    assert composition is not None
    return composition


def exchanged(detections: list[Detection], chosen: Detection, **changes: object) -> list[Detection]:
    """An image in which one object is different."""
    return [replace(each, **changes) if each is chosen else each for each in detections]


def test_score_is_one_if_and_only_if_the_image_is_right_beyond_doubt() -> None:
    draw = random.Random(57)
    right = whole = 0
    for _ in range(1000):
        composition = draw_row(draw)
        detections = [
            *(
                draw_object(each.label, draw, colour=each.colour)
                for each in composition.include
                for _ in range(each.count)
            ),
            *(draw_object(draw.choice(CLASSES), draw) for _ in range(draw.choice((0, 0, 0, 2)))),
        ]
        is_right = judge(composition, detections).is_right
        is_one = score_densely(composition, detections).value == 1
        has_trace = any(
            sum(d.label == each.label for d in detections) >= each.count
            for each in composition.exclude
        )
        assert is_one == (is_right and not has_trace), (composition, detections)
        right, whole = right + is_right, whole + is_one
    assert 200 < whole < right < 800


def draw_row(draw: random.Random) -> Composition:
    one, two = draw.sample(CLASSES, 2)
    first, second = (draw.choice((None, "red", "blue")) for _ in range(2))
    relation = draw.choice((None, None, *RELATIONS))
    other = None if relation is None else 0
    count = draw.randint(1, 2)
    include = (Condition(one, count, first), Condition(two, 1, second, relation, other))
    exclude = draw.choice(((), (Condition(one, count + 1),)))
    return Composition(include, exclude, draw.choice(("", "counting")))


def draw_object(label: str, draw: random.Random, *, colour: str | None = None) -> Detection:
    """An object of a colour without doubt, which is mostly the one that is asked for."""
    score = 1.0 if draw.random() < 0.9 else 0.2
    if colour is None or draw.random() < 0.1:
        colour = draw.choice(("red", "blue"))
    x, y = (draw.choice((0.0, 20.0, 50.0, 100.0)) for _ in range(2))
    chances = {"red": 0.0, "blue": 0.0} | {colour: 1.0}
    return Detection(label, score, x, y, x + 20.0, y + 10.0, colours=chances)
