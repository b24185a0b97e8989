from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rewards.terms.composition_rows import (
    Composition,
    CompositionError,
    Condition,
    read_composition,
)

DOG, CAT = {"class": "dog", "count": 1}, {"class": "cat", "count": 1}


def test_rows_become_conditions() -> None:
    row = {
        "prompt": "a photo of two red cars left of a dog",
        "tag": "own",
        "include": [
            {"class": "dog", "count": 1},
            {"class": "car", "count": 2, "color": "red", "position": ["left of", 0]},
        ],
        "exclude": [{"class": "car", "count": 3}, {"class": "tree", "count": 1}],
    }
    found = read_composition(row)
    dog, cars = Condition("dog", 1), Condition("car", 2, "red", "left of", 0)
    assert found == Composition((dog, cars), (Condition("car", 3), Condition("tree", 1)), "own")
    assert found.classes == ("dog", "car", "tree")


def test_conditions_are_described_in_words() -> None:
    found = read_composition(
        {
            "include": [
                DOG,
                {"class": "car", "count": 2, "color": "red", "position": ["above", 0]},
            ],
            # Exactly two cars, and fewer than four trees.
            "exclude": [CAT, {"class": "car", "count": 3}, {"class": "tree", "count": 4}],
        }
    )
    assert found is not None
    assert found.describe() == ("dog", "2 red car above dog", "no cat", "fewer than 4 tree")


def test_position_may_name_a_later_condition() -> None:
    found = read_composition({"include": [DOG | {"position": ["above", 1]}, CAT]})
    assert found == Composition((Condition("dog", 1, None, "above", 1), Condition("cat", 1)))


def test_values_of_none_count_as_absent() -> None:
    empty = {"color": None, "position": None}
    row = {"include": [DOG | empty], "exclude": None, "tag": None}
    assert read_composition(row) == Composition((Condition("dog", 1),))


@pytest.mark.parametrize(
    "metadata", [{}, {"tag": "counting"}, {"include": None, "exclude": None, "other": 1}]
)
def test_rows_without_conditions_ask_for_nothing(metadata: dict[str, object]) -> None:
    assert read_composition(metadata) is None


def include(**changes: object) -> dict[str, object]:
    """A row whose second condition is changed."""
    return {"include": [CAT, DOG | changes]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"include": []}, "include has no condition.*name at least one"),
        ({"exclude": [DOG]}, "include has no condition"),
        ({"include": "[...]"}, "include = '.*' must be a list of conditions, such as"),
        ({"include": DOG}, "include = {.*} must be a list"),
        ({"include": ["dog"]}, r"include\[0\] = 'dog' must be a condition"),
        ({"include": [DOG], "tag": 3}, "tag = 3 must be a text"),
        ({"include": [DOG], "tag": "Counting "}, "tag = 'Counting ' is not counting"),
        (include(colour="red"), r"include\[1\] has the key 'colour'.*did you mean color\?"),
        (include(bbox=1), r"include\[1\] has the key 'bbox'; its keys are class, count"),
        ({"include": [{"count": 1}]}, r"include\[0\]: class is missing"),
        (include(**{"class": 7}), r"include\[1\]: class = 7; it must be the name"),
        (include(**{"class": " "}), "class = ' '"),
        (include(**{"class": "dog "}), "class = 'dog '; .* without spaces around it"),
        ({"include": [{"class": "dog"}]}, r"include\[0\]: count is missing"),
        (include(count=0), "count = 0; it must be a whole number of at least 1"),
        (include(count=2.0), "count = 2.0"),
        (include(count="2"), "count = '2'"),
        (include(count=True), "count = True"),
        (include(color="grey"), r"include\[1\]: color = 'grey'; it must be .*red, orange.* white$"),
        (include(color="Red"), r"color = 'Red'.*: did you mean red\?"),
        (include(color=["red"]), "color = .*must be one of red, orange"),
        (include(position=["next to", 0]), "relation 'next to'; it must be one of left of, right"),
        (include(position=["left off", 0]), r"did you mean left of\?"),
        (include(position="left of"), "position = 'left of'; it must be a relation and the index"),
        (include(position=["left of"]), "must be a relation and the index"),
        (include(position=["left of", "0"]), "must be a relation and the index"),
        (include(position=["left of", True]), "must be a relation and the index"),
        (include(position=["left of", 2]), r"include\[1\]: .*condition 2; .* conditions 0 to 1"),
        (include(position=["left of", -1]), "position names condition -1"),
        (include(position=["left of", 1]), r"include\[1\]: position names the condition itself"),
        ({"include": [DOG], "exclude": [{"class": "cat"}]}, r"exclude\[0\]: count is missing"),
        (
            {"include": [DOG], "exclude": [CAT | {"color": "red"}]},
            r"exclude\[0\] has the key 'color'; its keys are class, count",
        ),
        (
            {"include": [DOG, DOG | {"position": ["above", 0]}]},
            "position compares dog with dog; no image can be right",
        ),
        (
            {"include": [DOG | {"color": "red"}, DOG | {"color": "blue"}]},
            "include asks for dog in red and in blue; no image can be right",
        ),
        (
            {"include": [DOG | {"count": 3}], "exclude": [DOG | {"count": 3}]},
            "at least 3 dog, and exclude for fewer than 3; .* for exactly 3, exclude 4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_in_another_form_are_refused(row: dict[str, object], message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        read_composition(row)


def test_all_rows_of_geneval_are_read(assets_dir: Path) -> None:
    lines = (assets_dir / "prompts" / "geneval_metadata.jsonl").read_text().splitlines()
    found = [read_composition(json.loads(line)) for line in lines]
    assert Counter(each.tag for each in found) == {
        "single_object": 80,
        "two_object": 99,
        "counting": 80,
        "colors": 94,
        "position": 100,
        "color_attr": 100,
    }
    # All classes of COCO.
    assert len({label for each in found for label in each.classes}) == 80
    conditions = [condition for each in found for condition in each.include]
    assert sum(each.colour is not None for each in conditions) == 294
    assert sum(each.relation is not None for each in conditions) == 100
