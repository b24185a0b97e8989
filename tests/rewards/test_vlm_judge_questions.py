"""Questions in the rows of prompts: which are refused, and how others are asked."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from pydantic import ValidationError

from rewards.types import Prompt
from tests.rewards.endpoint import Reply, Request
from tests.rewards.judges import check, config, connect, judging, says, text_in


def problems_of(value: object, **options: Any) -> list[str]:
    judged = config("{question}", questions="asked", **options)
    return [*judged.check_metadata({"dog": {"asked": value}})]


@pytest.mark.parametrize(
    ("value", "options", "error"),
    [
        (None, {}, "prompt dog: there is no column 'asked'.* add it to every row"),
        ([], {}, r"prompt dog: asked = \[\] must be a list of at least one question"),
        ("Is it?", {}, "prompt dog: asked = 'Is it\\?' must be a list.* use a .jsonl"),
        ([1], {}, r"asked\[0\] = 1 must be a question"),
        (["Is it?", " "], {}, r"asked\[1\] = ' ' must be a question that is not empty"),
        ([["Is it?"]], {}, r"asked\[0\] = \['Is it\?'\] must be a question"),
        ([["Is it?", "yes"]], {}, r"asked\[0\] = .* only vlm_judge.read=probability uses"),
        ([["Is it?", 4]], {"read": "probability"}, r"asked\[0\] = .* must be a question"),
        ([["Which?", "red"]], {"read": "probability"}, r"asked\[0\] = .* must be yes, no"),
    ],
)
def test_rows_without_questions_are_refused_naming_prompt_and_entry(
    value: object, options: dict[str, Any], error: str
) -> None:
    (problem,) = problems_of(value, **options)
    assert re.search(error, problem)


def test_rows_with_questions_are_accepted() -> None:
    assert problems_of(["Is it?", "Is it so?"]) == []
    answered = ["Is it?", ["How many?", "four"], ["Is it?", "No"]]
    assert problems_of(answered, read="probability") == []


def test_row_is_missed_before_a_model_is_loaded_also_where_the_question_names_a_column() -> None:
    (problem,) = config("{metadata[count]}").check_metadata({"dog": {}})
    assert "'count', a column that prompt dog does not have" in problem


@pytest.mark.parametrize(
    ("question", "options", "key"),
    [
        ("{prompt}", {"questions": "asked"}, "question"),
        ("{question}", {}, "question"),
        ("{prompt} {lowest}", {"read": "probability"}, "question"),
        ("{prompt}", {"read": "probability", "pattern": "(.)"}, "pattern"),
        ("{prompt}", {"read": "expected_number", "lowest": -1, "highest": 5}, "read"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    question: str, options: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        config(question, **options)
    (details,) = caught.value.errors()
    assert details["loc"] == (key,)


def test_questions_depend_on_the_prompt() -> None:
    assert config("{question}", questions="asked").needs() == ("prompt",)
    assert config("{question} {text}", questions="asked").needs() == ("prompt", "text")


def test_questions_are_asked_with_other_parts_of_the_prompt_and_their_mean_is_the_score() -> None:
    asked = {"asked": ["Is {it} red?", "Is it a car?"], "tag": "colour"}
    with judging(lambda request: says("2" if "car" in text_in(request) else "5")) as judge:
        template = "{prompt} ({metadata[tag]}): {question} {lowest}-{highest}"
        reward = connect(judge, template, questions="asked")
        found = check(reward, 1, Prompt("dog", "a dog", metadata=asked))
    assert found.values.tolist() == pytest.approx([0.35])
    texts = ["a dog (colour): Is it a car? 0-10", "a dog (colour): Is {it} red? 0-10"]
    assert sorted(map(text_in, judge.requests)) == texts
    assert found.notes == (f"5 ({texts[1]})\n2 ({texts[0]})",)


def test_questions_of_an_image_are_asked_at_once_within_the_bound() -> None:
    together = threading.Barrier(3, timeout=10)

    def answer(request: Request) -> Reply:
        together.wait()  # breaks unless three requests are in flight
        return says("5")

    dog = Prompt("dog", "a dog", metadata={"asked": [f"Question {n}?" for n in range(3)]})
    with judging(answer) as judge:
        reward = connect(judge, "{question}", questions="asked", requests_at_once=3)
        assert check(reward, 2, dog).values.tolist() == [0.5, 0.5]
