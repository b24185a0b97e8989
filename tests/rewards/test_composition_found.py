from __future__ import annotations

import pytest

from rewards.detection import Detection
from rewards.terms.composition_found import describe_found
from rewards.terms.composition_rows import Composition, Condition


def square(label: str, x: float, y: float, score: float = 0.95, colour: str = "") -> Detection:
    """An object of 20 x 20 pixels around a point, of one colour."""
    colours = {"black": 0.25, colour: 0.5} if colour else None
    return Detection(label, score, x - 10.0, y - 10.0, x + 10.0, y + 10.0, colours=colours)


LEFT, RIGHT = square("dog", 20, 50), square("dog", 180, 50)
FAR_RIGHT = square("dog", 280, 50)
CAT = square("cat", 100, 50)
RED, BLUE = square("car", 20, 20, 0.9, "red"), square("car", 60, 20, 0.8, "blue")
THIRD = square("car", 100, 20, 0.7)

DOGS = Composition((Condition("dog", 2),), (Condition("dog", 3),))
LEFT_OF = Composition((Condition("cat", 1), Condition("dog", 1, None, "left of", 0)))
RED_CARS = Composition((Condition("car", 2, "red"),))


@pytest.mark.parametrize(
    ("composition", "detections", "found"),
    [
        # What an exact number is compared with is the number of all.
        (DOGS, [LEFT, RIGHT, CAT], ("2 dog",)),
        (DOGS, [LEFT, RIGHT, FAR_RIGHT], ("3 dog",)),
        (DOGS, [CAT], ("no dog",)),
        # At the threshold of 0.3 is not above it; counts have one of 0.9.
        (DOGS, [LEFT, square("dog", 60, 50, 0.3)], ("dog",)),
        (Composition(DOGS.include, tag="counting"), [LEFT, square("dog", 0, 50, 0.8)], ("dog",)),
        # Colours of those that the rule looks at.
        (RED_CARS, [RED, RED, THIRD], ("2 red car", "1 more car")),
        (RED_CARS, [BLUE, RED, THIRD], ("red car", "blue car", "1 more car")),
        (LEFT_OF, [LEFT, CAT], ("cat", "dog left of cat")),
        (LEFT_OF, [RIGHT, CAT], ("cat", "dog right of cat")),
        (LEFT_OF, [square("dog", 180, 130), CAT], ("cat", "dog right of and below cat")),
        (LEFT_OF, [square("dog", 100, 50), CAT], ("cat", "dog")),
        (LEFT_OF, [LEFT], ("no cat", "dog")),
        # A side on which all of them are.
        (
            Composition((Condition("cat", 1), Condition("dog", 2, None, "left of", 0))),
            [RIGHT, FAR_RIGHT, CAT],
            ("cat", "2 dog right of cat"),
        ),
        (
            Composition((Condition("cat", 1), Condition("dog", 2, None, "left of", 0))),
            [LEFT, RIGHT, CAT],
            ("cat", "2 dog"),
        ),
        (Composition((Condition("cat", 1),), (Condition("dog", 1),)), [CAT], ("cat", "no dog")),
        (Composition((Condition("dog", 1), Condition("dog", 2))), [LEFT, RIGHT], ("2 dog",)),
    ],
)
def test_objects_are_described_as_far_as_the_prompt_asks_for_them(
    composition: Composition, detections: list[Detection], found: tuple[str, ...]
) -> None:
    assert describe_found(composition, detections) == found


@pytest.mark.parametrize(
    ("composition", "detections"),
    [
        (DOGS, [LEFT, RIGHT]),
        (RED_CARS, [RED, RED]),
        (LEFT_OF, [LEFT, CAT]),
        (Composition((Condition("cat", 1),), (Condition("dog", 1),)), [CAT]),
    ],
)
def test_an_image_with_just_what_is_asked_for_is_described_as_the_prompt(
    composition: Composition, detections: list[Detection]
) -> None:
    assert describe_found(composition, detections) == composition.describe()
