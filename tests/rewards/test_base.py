from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rewards.base import InvalidScoresError, Need, has_needs, score_with_notes
from rewards.parts import Piece
from rewards.types import Prompt, Scores

TARGET = torch.zeros(3, 2, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt("a", "a"), {"prompt"}),
        (Prompt("a", "a", texts=("", " ")), {"prompt"}),
        (Prompt("a", "a", texts=("", "A")), {"prompt", "text"}),
        (Prompt("a", "a", target=TARGET), {"prompt", "target"}),
    ],
)
def test_has_needs_asks_for_every_need(prompt: Prompt, expected: set[Need]) -> None:
    met = {need for need in ("prompt", "text", "target") if has_needs(prompt, (need,))}
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


class Noting(Fixed):
    """Has notes too."""

    def score_with_notes(self, prompts, pixels):
        return Scores(self._values, self._notes)


class Placed(Fixed):
    """Has parts, notes, or anything else that a user's function returns."""

    def __init__(self, **fields):
        # Not by its constructor, which refuses other types while tests run.
        self._scores = object.__new__(Scores)
        vars(self._scores).update({"values": torch.ones(2), "notes": (), "parts": None, **fields})

    def score_with_notes(self, prompts, pixels):
        return self._scores

    score_with_parts = score_with_notes


TWO = [Prompt("a", "a")] * 2, torch.zeros(2, 3, 4, 4, dtype=torch.uint8)


def test_score_with_notes_takes_notes_where_a_term_has_them_and_no_gradient() -> None:
    values = torch.tensor([0.25, 0.5], requires_grad=True)
    plain = score_with_notes(Fixed(values), *TWO)
    noted = score_with_notes(Noting(values, ("x", "")), *TWO)
    assert plain.values.tolist() == noted.values.tolist() == [0.25, 0.5]
    assert (plain.notes, noted.notes) == ((), ("x", ""))
    assert not plain.values.requires_grad
    assert not noted.values.requires_grad


def test_score_with_notes_runs_a_term_without_gradient() -> None:
    class Learned(Fixed):
        def score(self, prompts, pixels):
            assert not torch.is_grad_enabled()
            return self._values

    assert score_with_notes(Learned(torch.zeros(2)), *TWO).values.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        (("only one",), "images 0 to 1: returned 1 notes; .* one per"),
        ("ab", "notes are 'ab'; .* tuple of strings"),
        (("a", 1), r"notes are \('a', 1\); .* tuple of strings"),
    ],
)
def test_score_with_notes_refuses_what_are_no_notes(notes: object, message: str) -> None:
    with pytest.raises(InvalidScoresError, match=message):
        score_with_notes(Placed(notes=notes), *TWO)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.1, 0.2], "images 0 to 1: returned a list; .* torch.tensor"),
        (torch.zeros(3), r"images 0 to 1: returned torch.float32 of shape \(3,\); .*\(2,\)"),
        (torch.zeros(2, 1), r"returned torch.float32 of shape \(2, 1\)"),
        (torch.zeros(2).half(), r"returned torch.float16 of shape \(2,\)"),
        (torch.tensor([0.0, torch.nan]), "^image 1: returned nan; .* finite"),
        (torch.tensor([-torch.inf, 0.0]), "^image 0: returned -inf; .* finite"),
    ],
)
def test_score_with_notes_refuses_what_is_no_score(values: object, message: str) -> None:
    with pytest.raises(InvalidScoresError, match=message):
        score_with_notes(Fixed(values), *TWO)


WORD = Piece(0.5, 0.0, 1.0, 2.0, 4.0, "A")


def test_score_with_notes_gives_parts_where_they_are_asked_for() -> None:
    for parts in (torch.full((2, 2, 1), 0.5), ((WORD,), ())):
        term = Placed(parts=parts)
        assert score_with_notes(term, *TWO).parts is None
        assert torch.equal(score_with_notes(term, *TWO, with_parts=True).values, torch.ones(2))
        assert str(score_with_notes(term, *TWO, with_parts=True).parts) == str(parts)
    assert score_with_notes(Fixed(torch.ones(2)), *TWO, with_parts=True).parts is None


def test_pieces_become_tuples_of_plain_numbers() -> None:
    piece = Piece(*np.array([0.5, 0.0, 1.0, 2.0, 4.0]), "A")
    found = score_with_notes(Placed(parts=[[piece], []]), *TWO, with_parts=True).parts
    # Numbers of numpy equal those of Python, but cannot be stored as JSON.
    assert str(found) == str(((WORD,), ()))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (torch.ones(1, 2, 2), r"images 0 to 1: parts are .*shape \(1, 2, 2\); .*\(2, rows, col"),
        (torch.ones(2, 4), r"parts are torch.float32 of shape \(2, 4\)"),
        (torch.ones(2, 0, 4), r"parts are torch.float32 of shape \(2, 0, 4\)"),
        (torch.ones(2, 2, 2).double(), "parts are torch.float64"),
        (torch.tensor([[[1.0]], [[torch.inf]]]), "image 1: a part .* not finite; .* has 0"),
        (torch.ones(2, 2, 2), "images 0 to 1: the mean of the parts is the score, .* divide"),
        (np.ones((2, 2, 2)), "parts are a ndarray; they must be .*torch.float32 .*rewards.Piece"),
        (((WORD,),), "returned pieces of 1 images; there must be one tuple .* per image"),
        ((WORD, WORD), "image 0: pieces are Piece.*; they must be a tuple"),
        (((), (0.5,)), r"image 1: pieces are \(0.5,\); they must be a tuple of rewards.Piece"),
        (((), (replace(WORD, value=math.nan),)), "^image 1: Piece.*nan.* is not finite; leave"),
        (((replace(WORD, bottom=math.inf),), ()), "image 0: Piece.*inf.* is not finite"),
        (((replace(WORD, left=3.0),), ()), "ends before it begins; right must be at least left"),
        (((replace(WORD, top=5.0),), ()), "ends before it begins; .*bottom at least top"),
        (((Piece(1.0, 0.0, 0.5, 0.5, 1.0),), ()), "no box .* after pixel 1; boxes are in pixels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_score_with_notes_refuses_what_are_no_parts(parts: object, message: str) -> None:
    with pytest.raises(InvalidScoresError, match=message):
        score_with_notes(Placed(parts=parts), *TWO, with_parts=True)


@pytest.mark.parametrize("parts", [((), ()), ((Piece(*[0.0] * 5),), ())])
def test_images_may_have_no_pieces_or_ones_without_area(parts: object) -> None:
    assert score_with_notes(Placed(parts=parts), *TWO, with_parts=True).parts == parts
