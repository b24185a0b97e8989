from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.terms.vlm_judge_answers import (
    YES_OR_NO,
    Answer,
    Reading,
    read_first_token,
    read_numbers,
    worths_of_numbers,
    worths_of_right_answer,
)


def numbers(text: str, pattern: str | None = None, lowest: int = 0, highest: int = 10) -> Reading:
    return read_numbers(Answer(text), lowest=lowest, highest=highest, pattern=pattern)


def first(answer: dict[str, float], worths: dict[str, float] | None = None) -> Reading:
    tokens = tuple(answer.items())
    return read_first_token(Answer("", first_tokens=tokens), worths or YES_OR_NO)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("-5", 0.0), ("5", 1.0), (" 2\n", 0.7), ("2.5", 0.75), ("-2.5", 0.25), ("-0", 0.5)],
)
def test_numbers_map_an_answer_to_the_unit_range(answer: str, expected: float) -> None:
    found = numbers(answer, lowest=-5, highest=5)
    assert (found.score, found.note) == (pytest.approx(expected), answer)


@pytest.mark.parametrize(
    "answer",
    ["", "seven", "7/10", "7.", ".5", "7 8", "**7**", "7,5", "1e1", "nan", "11", "10.01", "-1"],
)
def test_numbers_need_one_number_in_range(answer: str) -> None:
    assert numbers(answer) == Reading(None, answer)


@pytest.mark.parametrize(
    ("pattern", "answer", "expected"),
    [
        (r"Score: (\S+)", "I see a dog. Score: 7", 0.7),
        (r"Score: (\S+)", "Score: 7 and Score: 8", 0.75),  # all matches
        (r"(\d)-(\d)-(\d)", "1-2-6", 0.3),  # all groups
        (r"(\d)-(\d)|<(\d)>", "2-4 <9>", 0.5),  # a group that took no part is none
        (r"Score:(.*)", "Score: 7 ", 0.7),
        (r"(?i)score: (\d)", "SCORE: 7", 0.7),
    ],
)
def test_numbers_are_the_mean_of_all_captures(pattern: str, answer: str, expected: float) -> None:
    assert numbers(answer, pattern).score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [
        (r"Score: (\S+)", "7"),
        (r"Score: (\S+)", "Score: 7."),
        (r"Score: (\S+)", "Score: 11"),
        (r"Score: (\S+)", "Score: 7 but Score: none"),
        (r"Score:( \d)?", "Score: good"),
        (r"Score: (\d*)", "Score: x"),
        (r"Scores: (\d*);(\d*)", "Scores: 7;"),
    ],
)
def test_an_answer_without_a_number_in_every_capture_has_no_score(
    pattern: str, answer: str
) -> None:
    assert numbers(answer, pattern) == Reading(None, answer)


def test_why_there_is_no_answer_is_not_searched_for_numbers() -> None:
    refusal = Answer("status 400 Bad Request", is_refusal=True)
    assert read_numbers(refusal, lowest=0, highest=1000, pattern=r"(\d+)").score is None
    assert read_first_token(refusal, YES_OR_NO) == Reading(None, refusal.text)


@given(st.lists(st.floats(1, 5), min_size=1, max_size=6))
def test_numbers_within_a_text_are_averaged_before_they_are_mapped(values: list[float]) -> None:
    text = " ".join(f"Score (1-5): {value:.3f}," for value in values)
    found = numbers(text, r"\(1-5\): ([\d.]+)", lowest=1, highest=5).score
    assert found == pytest.approx((sum(values) / len(values) - 1) / 4, abs=1e-3)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ({"Yes": 0.9, "No": 0.1}, 0.9),
        ({"Yes": 0.6, "No": 0.2}, 0.75),  # of what is said otherwise, nothing is known
        ({" yes": 0.3, "YES": 0.1, "No": 0.2, " no\n": 0.2}, 0.5),
        ({"No": 1.0}, 0.0),
        ({"Yes": 0.5, "Yesterday": 0.5}, 1.0),
    ],
)
def test_first_token_gives_yes_against_no_in_any_form(
    tokens: dict[str, float], expected: float
) -> None:
    assert first(tokens).score == pytest.approx(expected)


def test_first_token_gives_the_expected_number() -> None:
    one_to_five = worths_of_numbers(1, 5)
    assert first({"4": 0.5, "5": 0.25, " 3": 0.25}, one_to_five).score == pytest.approx(0.75)
    # A number beyond the scale, a word and a longer number are no answers.
    assert first({"5": 0.6, "6": 0.1, "One": 0.1, "50": 0.2}, one_to_five).score == 1.0


@pytest.mark.parametrize(
    ("tokens", "note"),
    [
        ({"The": 0.7, "Yes": 0.2, "No": 0.1}, "0.30 of the probability is on yes, no: The 0.70, "),
        ({"<think>": 1.0}, "0.00 of the probability is on yes, no: <think> 1.00"),
        ({"Yes": math.nan}, "nan of the probability"),
        ({"\n": 1.0}, "0.00 of the probability is on yes, no: '\\n' 1.00"),
        ({}, "0.00 of the probability is on yes, no: "),
    ],
)
def test_first_token_that_is_mostly_no_answer_gives_no_score(
    tokens: dict[str, float], note: str
) -> None:
    found = first(tokens)
    assert found.score is None
    assert found.note.startswith(note)


@given(
    st.dictionaries(
        st.sampled_from(["Yes", " yes", "no", "No", "NO ", "Maybe", "yes."]),
        st.floats(0.001, 1.0),
        min_size=1,
    )
)
def test_a_score_of_a_first_token_is_its_odds_and_never_from_less_than_half(
    weights: dict[str, float],
) -> None:
    total = sum(weights.values())
    tokens = {token: weight / total for token, weight in weights.items()}
    yes = sum(p for token, p in tokens.items() if token.strip().lower() == "yes")
    no = sum(p for token, p in tokens.items() if token.strip().lower() == "no")
    score = first(tokens).score
    if yes + no < 0.5 - 1e-9:
        assert score is None
    elif yes + no > 0.5 + 1e-9:
        assert score == pytest.approx(yes / (yes + no))


@pytest.mark.parametrize(
    ("right", "tokens", "expected"),
    [
        ("Yes", {"Yes": 0.8, "No": 0.2}, 0.8),
        ("no", {"Yes": 0.8, "No": 0.2}, 0.2),
        ("four", {"four": 0.25, "Four": 0.25, "4": 0.25, "three": 0.25}, 0.75),
        ("4", {" four": 1.0}, 1.0),
        ("four", {"12": 0.5, "Twelve": 0.4, "four": 0.1}, 0.1),
        ("zero", {"None": 0.9, "one": 0.1}, 0.9),
    ],
)
def test_a_right_answer_is_worth_its_probability(
    right: str, tokens: dict[str, float], expected: float
) -> None:
    worths = worths_of_right_answer(right)
    assert worths is not None
    assert first(tokens, dict(worths)).score == pytest.approx(expected)


@pytest.mark.parametrize("right", ["red", "", "10", "ten", "-1", "yes, it is"])
def test_other_right_answers_may_be_more_than_a_token(right: str) -> None:
    assert worths_of_right_answer(right) is None
