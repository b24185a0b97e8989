from __future__ import annotations

import pytest
import torch

from rewards.base import InvalidScoresError, Need, has_needs, score_with_notes
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


def test_score_with_notes_refuses_a_wrong_number_of_notes() -> None:
    with pytest.raises(InvalidScoresError, match="images 0 to 1: returned 1 notes; .* one per"):
        score_with_notes(Noting(torch.zeros(2), ("only one",)), *TWO)


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
