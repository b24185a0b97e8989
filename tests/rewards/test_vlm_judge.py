from __future__ import annotations

import json
import logging
import time
import traceback

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rewards.types import Prompt, RewardError
from tests.rewards.endpoint import Reply, Request, in_turn
from tests.rewards.judges import (
    DOG,
    check,
    config,
    connect,
    content_of,
    images_in,
    judging,
    level_in,
    says,
    score,
)


def test_judge_is_asked_in_openais_format() -> None:
    question = "Is {text} in: {prompt}? {lowest}-{highest}"
    pixels = torch.randint(0, 256, (1, 3, 4, 6), generator=torch.Generator().manual_seed(0))
    prompt = Prompt("sign", "a {sign}", texts=("OPEN", "24 h"))
    with judging(lambda request: says("5")) as judge:
        reward = connect(judge, question, lowest=1, highest=5)
        assert not reward.applies_to(DOG)
        assert reward.applies_to(prompt)
        assert reward.score([prompt], pixels.to(torch.uint8)).values == (1.0,)
    (request,) = judge.requests
    assert request.path == "/v1/chat/completions"
    payload, content = json.loads(request.body), content_of(request)
    assert payload.keys() == {"model", "messages", "temperature"}
    assert (payload["model"], payload["temperature"]) == ("judge-1", 0)
    assert [part["type"] for part in content] == ["image_url", "text"]
    assert content[1]["text"] == 'Is "OPEN", "24 h" in: a {sign}? 1-5'
    assert np.array_equal(images_in(request)[0], pixels[0].permute(1, 2, 0).numpy())
    assert "Authorization" not in request.headers


def test_judge_of_an_edit_sees_source_and_result_in_this_order() -> None:
    source = torch.full((3, 4, 6), 9, dtype=torch.uint8)
    prompt = Prompt("edit", "make it red", sources=(source,))
    with judging(lambda request: says("1")) as judge:
        connect(judge).score([prompt], torch.zeros(1, 3, 4, 6, dtype=torch.uint8))
    (request,) = judge.requests
    texts = [part.get("text", "an image") for part in content_of(request)]
    assert texts == ["Source:", "an image", "Result of the edit:", "an image", "make it red?"]
    assert [int(image.max()) for image in images_in(request)] == [9, 0]


def test_judge_scores_in_the_order_of_the_images_with_a_bound_on_requests_in_flight() -> None:
    in_flight: list[int] = []
    most: list[int] = []

    def later_for_the_first(request: Request) -> Reply:
        in_flight.append(1)
        most.append(len(in_flight))
        time.sleep(0.05 + 0.02 * (5 - level_in(request)))
        in_flight.pop()
        return says(f" {level_in(request)}\n")

    with judging(later_for_the_first) as judge:
        reward = connect(judge, requests_at_once=2)
        scores = check(reward, 6)
    torch.testing.assert_close(scores.values, torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.5]))
    assert scores.notes == ("0", "1", "2", "3", "4", "5")
    assert max(most) == 2


def test_judge_that_gives_no_score_is_asked_again_with_other_seeds() -> None:
    def at_the_third_time(request: Request) -> Reply:
        is_answered = level_in(request) == 1 or json.loads(request.body).get("seed") == 2
        return says("7" if is_answered else "I like it")

    with judging(at_the_third_time) as judge:
        found = check(connect(judge), 2)
    torch.testing.assert_close(found.values, torch.tensor([0.7, 0.7]))
    assert found.notes == ("7", "7")
    asked = [json.loads(request.body) for request in judge.requests if level_in(request) == 0]
    assert [(each["temperature"], each.get("seed")) for each in asked] == [
        (0, None),
        (1, 1),
        (1, 2),
    ]


@pytest.mark.parametrize(
    ("reply", "note"),
    [
        (says("I give 7."), "I give 7."),
        (says("11"), "11"),
        (says(None), ""),
        (says(None, refusal="I cannot help with that"), "I cannot help with that"),
        (Reply(400, b"filtered"), "status 400 Bad Request"),
    ],
)
def test_judge_that_gives_no_score_four_times_refuses_the_image_alone(
    reply: Reply, note: str
) -> None:
    with judging(lambda request: reply if level_in(request) == 2 else says("5")) as judge:
        found = check(connect(judge), 4)
    assert found.values.isnan().tolist() == [False, False, True, False]
    assert found.values[[0, 1, 3]].tolist() == [0.5] * 3
    assert found.notes == ("5", "5", note, "5")
    assert len(judge.requests) == 3 + 4


@pytest.mark.parametrize("reply", [Reply(400), says(None, refusal="Not 1 word")])
def test_a_refusal_is_not_searched_for_numbers(reply: Reply) -> None:
    with judging(lambda request: reply if level_in(request) == 1 else says("Score: 10")) as judge:
        found = check(connect(judge, pattern=r"(\d+)", highest=1000), 2)
    assert found.values.isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    "reply",
    [Reply(body=b'{"choices": []}'), Reply(body=b"hello"), says(["7"])],
    ids=["no choice", "no JSON", "no text"],
)
def test_what_is_no_chat_completion_ends_the_step_naming_prompt_and_image(reply: Reply) -> None:
    with judging(lambda request: reply if level_in(request) == 2 else says("5")) as judge:
        reward = connect(judge)
        with pytest.raises(RewardError, match="prompt dog, image 2: "):
            score(reward, 4)


def test_judge_does_not_ask_about_the_other_images_after_a_failure() -> None:
    with judging(lambda request: Reply(403)) as judge:
        reward = connect(judge, requests_at_once=1)
        with pytest.raises(RewardError, match=r"image 0: .* status 403"):
            score(reward, 10)
        assert len(judge.requests) < 4


@pytest.mark.parametrize(
    ("reply", "tries"),
    [(Reply(503, headers={"Retry-After": "0"}), 3), (Reply(401, b"not you"), 1), (Reply(302), 1)],
)
def test_judge_that_fails_ends_the_step_after_its_tries(reply: Reply, tries: int) -> None:
    with judging(lambda request: reply) as judge:
        reward = connect(judge, retries=2)
        with pytest.raises(RewardError, match=f"image 0: .*status {reply.status} "):
            score(reward, 1)
    assert len(judge.requests) == tries


def test_judge_that_cannot_be_reached_is_refused_before_and_during_a_run() -> None:
    with judging() as judge:
        reward = connect(judge)
    with pytest.raises(RewardError, match=f"image 0: {judge.url}/v1 .*ConnectError"):
        score(reward, 1)
    with pytest.raises(RewardError, match=f"{judge.url}/v1 .*ConnectError"):
        connect(judge)


def test_judge_need_not_list_its_models_but_must_know_the_key() -> None:
    with judging(models=404) as judge:
        assert score(connect(judge), 2).shape == (2,)
    with (
        judging(models=401) as judge,
        pytest.raises(RewardError, match="status 401 Unauthorized"),
    ):
        connect(judge)


def test_judge_gets_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    with judging() as judge:
        score(connect(judge, api_key_variable="JUDGE_KEY"), 1)
    assert judge.requests[0].headers["Authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize(
    ("value", "error"),
    [("", "JUDGE_KEY is not set"), ("sk secret", "contains a space")],
)
def test_judge_without_a_usable_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, error: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", value)
    with judging() as judge, pytest.raises(RewardError, match=error) as caught:
        connect(judge, api_key_variable="JUDGE_KEY")
    assert not value or value not in str(caught.value)


def test_key_is_in_no_error_or_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    caplog.set_level(logging.DEBUG)
    errors: list[RewardError] = []
    replies = Reply(401, b"bad key sk-secret"), Reply(200, b"hello"), None
    with judging(in_turn(*replies)) as judge:
        reward = connect(judge, api_key_variable="JUDGE_KEY")
        for _ in replies:
            with pytest.raises(RewardError) as caught:
                score(reward, 1)
            errors.append(caught.value)
    with pytest.raises(RewardError) as caught:
        score(reward, 1)
    texts = ["".join(traceback.format_exception(error)) for error in [*errors, caught.value]]
    assert not any("sk-secret" in text for text in [*texts, repr(reward), caplog.text])


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{promt}", "KeyError: 'promt'"),
        ('Answer {"score": 1}', "double literal braces"),
        ("a } b", "Single '}'"),
        ("{metadata.tag}", "AttributeError"),
        ("{metadata[tag][name]}", "TypeError"),
    ],
)
def test_question_that_cannot_be_filled_in_is_refused(template: str, error: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(template)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("template", "needs"),
    [
        ("How fine is it?", ()),
        ("Are there {metadata[count]}?", ("prompt",)),
        ("{text} in {prompt}?", ("prompt", "text")),
        ("{{text}} in {prompt}?", ("prompt",)),
        ("{{{text}}}?", ("text",)),
        ("{metadata[scene]}?", ("prompt",)),
    ],
)
def test_question_needs_what_it_asks_about(template: str, needs: tuple[str, ...]) -> None:
    assert config(template).needs() == needs


def test_question_may_name_further_columns_of_the_row() -> None:
    judged = config("Are there {metadata[count]} of {prompt}?")
    assert judged.needs() == ("prompt",)
    assert judged.columns() == ("count",)
    dogs = Prompt("dogs", "dogs", metadata={"count": 3})
    assert [each.text for each in judged.ask(dogs)] == ["Are there 3 of dogs?"]
    with judging() as judge:
        reward = connect(judge, "{metadata[count]}?")
        assert reward.applies_to(dogs)
        with pytest.raises(RewardError, match=r"'count'.* prompt dog "):
            reward.applies_to(Prompt("dog", "a dog"))
    (problem,) = config("{metadata[0]}?").check_metadata({"p": {"0": 1}})
    assert "filled in for prompt p (KeyError: 0)" in problem
