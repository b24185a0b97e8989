from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rewards.base import InvalidScoresError, Need, has_needs, score_checked
from rewards.score_map import ScoreBox
from rewards.types import Prompt, Scores

TARGET = torch.zeros(3, 2, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt("a", "a"), {"prompt"}),
        (Prompt("a", "a", texts=("", " ")), {"prompt"}),
        (Prompt("a", "a", texts=("", "A")), {"prompt", "text"}),
        (Prompt("a", "a", target=TARGET), {"prompt", "target"}),
        (Prompt("a", "a", metadata={"include": []}), {"prompt", "objects"}),
        (Prompt("a", "a", metadata={"exclude": []}), {"prompt", "objects"}),
        (Prompt("a", "a", metadata={"include": None, "tag": "counting"}), {"prompt"}),
    ],
)
def test_has_needs_asks_for_every_need(prompt: Prompt, expected: set[Need]) -> None:
    met = {need for need in ("prompt", "text", "target", "objects") if has_needs(prompt, (need,))}
    assert met == expected
    assert has_needs(prompt, ())
    assert not has_needs(prompt, ("prompt", "text", "target"))


class Fixed:
    """Returns what it is given."""

    def __init__(self, values, notes=None):
        self._values, self._notes = values, notes

    def applies_to(self, prompt):
        return True

    def score(self, prompts, pixels):
        return self._values

    def modules(self):
        return ()


class Placed(Fixed):
    """Has parts, notes, or anything else that a user's function returns."""

    def __init__(self, **fields):
        # Not by its constructor, which refuses other types while tests run.
        self._scores = object.__new__(Scores)
        vars(self._scores).update({"values": torch.ones(2), "notes": (), "parts": None, **fields})

    def score(self, prompts, pixels):
        return self._scores


TWO = [Prompt("a", "a")] * 2, torch.zeros(2, 3, 4, 4, dtype=torch.uint8)


def test_score_checked_takes_notes_where_a_term_has_them_and_no_gradient() -> None:
    values = torch.tensor([0.25, 0.5], requires_grad=True)
    plain = score_checked(Fixed(values), *TWO)
    noted = score_checked(Fixed(Scores(values, ("x", ""))), *TWO)
    assert plain.values.tolist() == noted.values.tolist() == [0.25, 0.5]
    assert (plain.notes, noted.notes) == ((), ("x", ""))
    assert not plain.values.requires_grad
    assert not noted.values.requires_grad


def test_score_checked_runs_a_term_without_gradient() -> None:
    class Learned(Fixed):
        def score(self, prompts, pixels):
            assert not torch.is_grad_enabled()
            return self._values

    assert score_checked(Learned(torch.zeros(2)), *TWO).values.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        (("only one",), "images 0 to 1: 1 notes"),
        ("ab", "notes are 'ab'"),
        (("a", 1), r"notes are \('a', 1\)"),
    ],
)
def test_score_checked_refuses_what_are_no_notes(notes: object, message: str) -> None:
    with pytest.raises(InvalidScoresError, match=message):
        score_checked(Placed(notes=notes), *TWO)


@pytest.mark.parametrize("objects", [(("dog",),), ("dog", "cat"), ("a", ())])
def test_score_checked_refuses_what_are_no_objects_of_the_images(objects: object) -> None:
    with pytest.raises(InvalidScoresError, match="images 0 to 1: objects are .* per image"):
        score_checked(Placed(objects=objects), *TWO)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.1], r"images 0 to 1: returned a list.*torch.tensor\(scores, dtype=torch.float32"),
        ([0.1, "0.2"], r"images 0 to 1: returned a list, \[0.1, '0.2'\]"),
        ([None, math.nan], "^image 1: returned nan"),
        ((0.5, 1e39), "^image 1: returned inf"),
        (torch.zeros(3), r"returned torch.float32 of shape \(3,\)"),
        (torch.zeros(2, 1), r"shape \(2, 1\)"),
        (
            torch.zeros(2).half(),
            r"torch.float16 .* one number per image; convert it with .float\(\)",
        ),
        (torch.tensor([0.0, torch.nan]), "^image 1: returned nan"),
        (torch.tensor([-torch.inf, 0.0]), "^image 0: returned -inf"),
    ],
)
def test_score_checked_refuses_what_is_no_score(values: object, message: str) -> None:
    with pytest.raises(InvalidScoresError, match=message):
        score_checked(Fixed(values), *TWO)


def test_score_checked_marks_what_a_term_refuses_and_nothing_else() -> None:
    three = [Prompt("a", "a")] * 3, torch.zeros(3, 3, 4, 4, dtype=torch.uint8)
    found = score_checked(Fixed(Scores((0.25, None, 0.5), ("", "no", ""))), *three)
    assert found.values.isnan().tolist() == [False, True, False]
    assert found.values[::2].tolist() == [0.25, 0.5]
    assert found.notes == ("", "no", "")
    assert score_checked(Fixed([1, np.float32(0), 2]), *three).values.tolist() == [1.0, 0.0, 2.0]


def test_no_place_of_a_refused_image_earned_anything() -> None:
    maps = Placed(values=[None, 1.0], score_map=torch.full((2, 2, 1), 0.5))
    pieces = Placed(values=[None, 1.0], score_map=((WORD,), (WORD,)))
    found = score_checked(maps, *TWO, with_map=True).score_map
    assert found.flatten(1).tolist() == [[0.0, 0.0], [0.5, 0.5]]
    assert score_checked(pieces, *TWO, with_map=True).score_map == ((), (WORD,))


WORD = ScoreBox(0.5, 0.0, 1.0, 2.0, 4.0, "A")


def test_score_checked_gives_parts_where_they_are_asked_for() -> None:
    for parts in (torch.full((2, 2, 1), 0.5), ((WORD,), ())):
        term = Placed(score_map=parts)
        assert score_checked(term, *TWO).score_map is None
        assert torch.equal(score_checked(term, *TWO, with_map=True).values, torch.ones(2))
        assert str(score_checked(term, *TWO, with_map=True).score_map) == str(parts)
    assert score_checked(Fixed(torch.ones(2)), *TWO, with_map=True).score_map is None


def test_pieces_become_tuples_of_plain_numbers() -> None:
    piece = ScoreBox(*np.array([0.5, 0.0, 1.0, 2.0, 4.0]), "A")
    # Not a kind of its own, of boxes that would be compared with each other.
    piece.__dict__.update(kind=None)
    found = score_checked(Placed(score_map=[[piece], []]), *TWO, with_map=True).score_map
    # Numbers of numpy equal those of Python, but cannot be stored as JSON.
    assert str(found) == str(((WORD,), ()))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (torch.ones(1, 2, 2), r"images 0 to 1: score_map is .*shape \(1, 2, 2\)"),
        (torch.ones(2, 4), r"shape \(2, 4\)"),
        (torch.ones(2, 0, 4), r"shape \(2, 0, 4\)"),
        (torch.ones(2, 2, 2).double(), r"torch.float64 .*; convert the map with .float\(\)"),
        (torch.tensor([[[1.0]], [[torch.inf]]]), "image 1: a part .* not finite"),
        (torch.ones(2, 2, 2), "images 0 to 1: the mean of the score map is the score"),
        (np.ones((2, 2, 2)), "score_map is a ndarray"),
        (((WORD,),), "score_map is a tuple"),
        ((WORD, WORD), "score_map is a tuple"),
        (((), (0.5,)), "score_map is a tuple"),
        (((), (replace(WORD, value=math.nan),)), "^image 1: ScoreBox.* is not finite"),
        (((replace(WORD, bottom=math.inf),), ()), "image 0: ScoreBox.* is not finite"),
        (((replace(WORD, left=3.0),), ()), "ends before it begins"),
        (((replace(WORD, top=5.0),), ()), "ends before it begins"),
        (((ScoreBox(1.0, 0.0, 0.5, 0.5, 1.0),), ()), "boxes are in pixels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_score_checked_refuses_what_are_no_parts(parts: object, message: str) -> None:
    with pytest.raises(InvalidScoresError, match=message):
        score_checked(Placed(score_map=parts), *TWO, with_map=True)


@pytest.mark.parametrize("parts", [((), ()), ((ScoreBox(*[0.0] * 5),), ())])
def test_images_may_have_no_pieces_or_ones_without_area(parts: object) -> None:
    assert score_checked(Placed(score_map=parts), *TWO, with_map=True).score_map == parts
