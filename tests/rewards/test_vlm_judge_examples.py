"""The examples of docs/guides/judges.md against endpoints that answer in the published formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rewards.config import RewardConfig
from rewards.terms.vlm_judge import VlmJudgeReward
from rewards.types import Prompt, RewardError
from tests.rewards.endpoint import Endpoint, Reply, Request
from tests.rewards.judges import DOG, check, judging, level_in, says, score, text_in, thinks

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "judges.md").read_text()

BICYCLES = "four white bicycles in front of three cows"
ANSWERS = {
    "How many bicycles are in the image? Answer in one word.": {
        "four": 0.5,
        "4": 0.4,
        "Three": 0.1,
    },
    "Are the bicycles white? Answer in one word.": {"Yes": 0.8, "No": 0.2},
    "Are the bicycles in front of the cows? Answer in one word.": {" yes": 0.5, "no": 0.5},
    "How many cows are in the image? Answer in one word.": {"Two": 0.7, "Three": 0.3},
}
"""What a model thinks of an image: right answers have 0.9, 0.8, 0.5 and 0.3."""


def term_of(page: str, name: str) -> dict[str, Any]:
    """Options of a term in an example."""
    for block in re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL):
        terms = yaml.safe_load(block)["reward"]["terms"]
        if name in terms:
            return terms[name]
    raise AssertionError(name)


def connect(name: str, judge: Endpoint) -> VlmJudgeReward:
    """The term of an example, but for its address."""
    section = {**term_of(PAGE, name), "url": f"{judge.url}/v1", "retries": 0}
    term = RewardConfig.model_validate({"terms": {name: section}}).terms[name]
    reward = term.build(torch.device("cpu"))
    assert isinstance(reward, VlmJudgeReward)
    return reward


def rates(alignment: object, coherence: object, style: object) -> str:
    """An answer of UnifiedReward 2.0."""
    return (
        f"Alignment Score (1-5): {alignment}\n"
        f"Coherence Score (1-5): {coherence}\n"
        f"Style Score (1-5): {style}"
    )


def test_unified_reward_is_the_mean_of_its_three_scores() -> None:
    said = rates(2.694700002670288, 2.371500015258789, 2.802500009536743)
    with judging(lambda _: says(said)) as judge:
        found = check(connect("unified_reward", judge), 1)
    assert found.values.tolist() == pytest.approx([(2.6229 - 1) / 4], abs=1e-4)
    assert found.notes == (said,)
    asked = text_in(judge.requests[0])
    assert asked.endswith(
        "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z"
        "\n\nYour task is provided as follows:\nText Caption: [a dog]"
    )
    assert json.loads(judge.requests[0].body)["model"] == "UnifiedReward"


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "Alignment Score (1-5): 3.5",  # cut off
        "Alignment Score (1-5): 3.5\nCoherence Score (1-5): 2.5\nStyle Score (1-5): ",
        rates("X", "Y", "Z"),
        rates(0, 0, 0),
        rates(7.5, 2, 3),
        "3.5",
        "I cannot see any image.",
    ],
)
def test_unified_reward_leaves_an_image_with_broken_answers_out(broken: str) -> None:
    def answer(request: Request) -> Reply:
        return says(broken if level_in(request) == 1 else rates(1.0, 3.0, 5.0))

    with judging(answer) as judge:
        found = check(connect("unified_reward", judge), 3)
    assert found.values.isnan().tolist() == [False, True, False]
    assert found.values[[0, 2]].tolist() == [0.5, 0.5]
    assert found.notes[1] == broken.strip()
    assert len(judge.requests) == 2 + 4


def test_first_version_of_unified_reward_ends_in_a_final_score() -> None:
    (pattern,) = re.findall(r"`pattern: '(Final Score.*?)'`", PAGE)
    said = "dog (object): 1\nblack (attribute): 0\nFinal Score: 4.2"
    match = re.search(pattern, said)
    assert match is not None
    assert match.groups() == ("4.2",)


def test_vqa_score_is_the_probability_of_yes() -> None:
    with judging(lambda _: thinks({"Yes": 0.6, " yes": 0.1, "No": 0.2, "It": 0.1})) as judge:
        found = check(connect("vqa_score", judge), 1)
    assert found.values.tolist() == pytest.approx([0.7 / 0.9])
    assert found.notes == ("Yes 0.60, No 0.20, yes 0.10",)
    body = json.loads(judge.requests[0].body)
    assert {key: body[key] for key in ("max_tokens", "logprobs", "top_logprobs")} == {
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 20,
    }
    assert text_in(judge.requests[0]) == 'Does this figure show "a dog"? Please answer yes or no.'


def test_expected_number_breaks_ties_of_the_likeliest_one() -> None:
    def answer(request: Request) -> Reply:
        four = 0.6 + 0.1 * level_in(request)
        return thinks({"4": four, "5": 1 - four})

    with judging(answer) as judge:
        values = score(connect("quality", judge), 2).tolist()
    assert values == pytest.approx([(4.4 - 1) / 4, (4.3 - 1) / 4])


@pytest.mark.parametrize("name", ["vqa_score", "quality"])
@pytest.mark.parametrize(
    ("broken", "note"),
    [
        (thinks({"<think>": 0.99, "Yes": 0.005, "5": 0.005}), "<think> 0.99"),
        (thinks({"The": 0.7, "Yes": 0.2, "4": 0.1}), "The 0.70, Yes 0.20, 4 0.10"),
        (says("", logprobs={"content": []}), "0.00 of the probability"),
        (says(None, refusal="Yes, but I cannot"), "Yes, but I cannot"),
        (Reply(400, b"filtered"), "status 400 Bad Request"),
    ],
)
def test_an_image_without_a_likely_answer_is_left_out(name: str, broken: Reply, note: str) -> None:
    good = thinks({"Yes": 0.5, "5": 0.5})
    with judging(lambda request: broken if level_in(request) == 1 else good) as judge:
        found = check(connect(name, judge), 3)
    assert found.values.isnan().tolist() == [False, True, False]
    assert found.values[[0, 2]].tolist() == [1.0, 1.0]
    assert note in found.notes[1]


@pytest.mark.parametrize(
    "reply",
    [
        says("Yes"),
        says("Yes", logprobs={"content": None}),
        says("Yes", logprobs={"content": [{"token": "Yes", "logprob": -0.1, "top_logprobs": []}]}),
        says("Yes", logprobs={"tokens": ["Yes"], "token_logprobs": [-0.1]}),  # of completions
    ],
    ids=["none", "null", "no others", "another format"],
)
def test_an_endpoint_without_probabilities_ends_the_step_and_is_named(reply: Reply) -> None:
    with judging(lambda _: reply) as judge:
        reward = connect("vqa_score", judge)
        with pytest.raises(RewardError) as caught:
            score(reward, 1)
    error = str(caught.value)
    for part in ("prompt dog, image 0", judge.url, "Qwen/Qwen3-VL-8B-Instruct", "read=number"):
        assert part in error


def bicycles() -> Prompt:
    (row,) = map(json.loads, re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    return Prompt("bicycles", row.pop("prompt"), metadata=row)


def thinking_of(answers: dict[str, dict[str, float]]) -> Callable[[Request], Reply]:
    return lambda request: thinks(answers[text_in(request)])


def test_geneval_2_is_the_mean_probability_of_the_right_answers() -> None:
    with judging(thinking_of(ANSWERS)) as judge:
        reward = connect("soft_tifa", judge)
        assert reward.applies_to(bicycles())
        found = check(reward, 2, bicycles())
    assert found.values.tolist() == pytest.approx([(0.9 + 0.8 + 0.5 + 0.3) / 4] * 2)
    lines = found.notes[0].splitlines()
    assert lines[1] == "Yes 0.80, No 0.20 (Are the bicycles white? Answer in one word.)"
    assert len(lines) == 4
    assert sorted(map(text_in, judge.requests)) == sorted([*ANSWERS, *ANSWERS])


def test_an_image_is_left_out_if_one_of_its_questions_has_no_answer() -> None:
    def answer(request: Request) -> Reply:
        question = text_in(request)
        if level_in(request) == 1 and "cows are" in question:
            return thinks({"Many": 0.9, "three": 0.1})
        return thinks(ANSWERS[question])

    with judging(answer) as judge:
        found = check(connect("soft_tifa", judge), 3, bicycles())
    assert found.values.isnan().tolist() == [False, True, False]
    (line,) = found.notes[1].splitlines()
    assert line.startswith("0.10 of the probability is on 0, zero, none, ...: Many 0.90, three")
    assert line.endswith("(How many cows are in the image? Answer in one word.)")
    assert len(judge.requests) == 3 * 4 + 3


def test_prompt_without_questions_ends_the_step() -> None:
    with judging() as judge:
        reward = connect("soft_tifa", judge)
    with pytest.raises(RewardError, match="prompt dog: there is no column 'vqa_list'"):
        reward.applies_to(DOG)
