from __future__ import annotations

import pytest

from rewards.terms.vlm_judge import Question, VlmJudgeConfig
from rewards.types import RewardError

QUESTION = Question("{prompt}?", lowest=0, highest=10)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("0", 0.0), ("10", 1.0), (" 7\n", 0.7), ("7.5", 0.75), ("007", 0.7), ("-0", 0.0)],
)
def test_question_maps_an_answer_to_the_unit_range(answer: str, expected: float) -> None:
    assert QUESTION.read(answer) == pytest.approx(expected)


def test_question_maps_its_own_range() -> None:
    question = Question("?", lowest=-5, highest=5)
    assert [question.read(answer) for answer in ("-5", "-2.5", "0", "5")] == [0, 0.25, 0.5, 1]


@pytest.mark.parametrize(
    "answer",
    [
        *("", " ", "seven", "7/10", "about 7", "7.", ".5", "7 8", "7\n8", "**7**", "+7", "7,5"),
        *("1e1", "nan", "inf", "0x7", "\u0667", "11", "10.01", "-1", "9" * 400),
    ],
)
def test_question_refuses_what_is_not_one_number_in_range(answer: str) -> None:
    with pytest.raises(ValueError, match="must be one number from 0 to 10 and nothing else"):
        QUESTION.read(answer)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{promt}", "has the placeholder {promt}; there are {prompt}, {text}, {lowest}, {highest}"),
        ("{}", "has the placeholder {}"),
        ("{0}", "has the placeholder {0}"),
        ("{prompt.prompt_id}", "has the placeholder {prompt.prompt_id}"),
        ("{prompt!r}", "as they stand here"),
        ("{lowest:3}", "as they stand here"),
        ('Answer {"score": 1}', "braces that are meant are doubled"),
        ("a } b", "cannot be filled in"),
        ("a { b", "cannot be filled in"),
    ],
)
def test_question_refuses_templates_that_cannot_be_filled_in(template: str, error: str) -> None:
    with pytest.raises(RewardError) as caught:
        Question(template, lowest=0, highest=10)
    assert error in str(caught.value)


@pytest.mark.parametrize("highest", [0, -1])
def test_question_refuses_a_range_that_is_none(highest: int) -> None:
    with pytest.raises(RewardError, match=f"lowest 0 is not below vlm_judge.highest {highest}"):
        Question("{prompt}", lowest=0, highest=highest)


@pytest.mark.parametrize(
    ("template", "needs"),
    [
        ("How fine is it?", ()),
        ("{prompt}?", ("prompt",)),
        ("{text}?", ("text",)),
        ("{text} in {prompt}?", ("prompt", "text")),
        ("{{text}} in {prompt}?", ("prompt",)),
        ("{{{text}}}?", ("text",)),
    ],
)
def test_question_needs_what_it_asks_about_as_the_config_says(
    template: str, needs: tuple[str, ...]
) -> None:
    assert Question(template, lowest=0, highest=10).needs() == needs
    values = {"kind": "vlm_judge", "weight": 1.0, "url": "http://a", "model": "b"}
    assert VlmJudgeConfig.model_validate({**values, "question": template}).needs() == needs
