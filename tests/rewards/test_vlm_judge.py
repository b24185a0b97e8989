from __future__ import annotations

import base64
import html
import io
import json
import logging
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from rewards.pictures import decode_png
from rewards.remote.judge import Endpoint, VlmJudgeReward
from rewards.terms.vlm_judge import Question
from rewards.types import Prompt, RewardError

DOG = Prompt("dog", "a dog")
PIXELS = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(10, 3, 2, 2)
QUESTION = Question("{prompt}?", lowest=0, highest=10)


@dataclass(frozen=True)
class Request:
    """What the endpoint got."""

    path: str
    headers: Mapping[str, str]
    payload: dict[str, Any]

    @property
    def picture(self) -> np.ndarray:
        url = self.payload["messages"][0]["content"][0]["image_url"]["url"]
        data = base64.b64decode(url.removeprefix("data:image/png;base64,"), validate=True)
        return np.array(Image.open(io.BytesIO(data)))

    @property
    def level(self) -> int:
        """The grey of the picture, which tells the pictures of a test apart."""
        return int(self.picture[0, 0, 0])


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def says(text: object) -> Reply:
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    return Reply(body=json.dumps({"id": "1", "choices": [{"message": message}]}).encode())


def level_of(request: Request) -> Reply:
    return says(str(request.level))


@dataclass
class Judge:
    """What a test sees of the endpoint."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def judging(
    answer: Callable[[Request], Reply | None] = level_of, *, models: Reply = Reply(body=b"{}")
) -> Iterator[Judge]:
    """A real endpoint on loopback that answers by a function; None breaks the connection."""
    judge = Judge()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self.reply(models)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = Request(self.path, dict(self.headers), json.loads(body))
            with judge.lock:
                judge.requests.append(request)
                judge.in_flight += 1
                judge.most_in_flight = max(judge.most_in_flight, judge.in_flight)
            reply = answer(request)
            with judge.lock:
                judge.in_flight -= 1
            if reply is None:
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self.reply(reply)

        def reply(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        def handle(self) -> None:
            with suppress(ConnectionError):  # whoever asked has given up
                super().handle()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield judge
        finally:
            server.shutdown()
            thread.join()


def connect(judge: Judge, question: Question = QUESTION, **options: Any) -> VlmJudgeReward:
    return VlmJudgeReward(Endpoint(judge.url, "judge-1", **{"retries": 0, **options}), question)


def score(reward: VlmJudgeReward, count: int) -> Tensor:
    return reward.score([DOG] * count, PIXELS[:count])


def in_turn(*replies: Reply | None) -> Callable[[Request], Reply | None]:
    left = list(replies)
    return lambda request: left.pop(0)


def test_judge_is_asked_in_openais_format() -> None:
    question = Question("Is {text} in: {prompt}? {lowest}-{highest}", lowest=1, highest=5)
    pixels = torch.randint(0, 256, (1, 3, 4, 6), generator=torch.Generator().manual_seed(0))
    prompt = Prompt("sign", "a {sign}", texts=("OPEN", "24 h"))
    with judging(lambda request: says("5")) as judge:
        reward = connect(judge, question)
        assert reward.score([prompt], pixels.to(torch.uint8)).tolist() == [1.0]
    (request,) = judge.requests
    assert request.path == "/v1/chat/completions"
    assert request.payload.keys() == {"model", "messages", "temperature"}
    assert request.payload["model"] == "judge-1"
    assert request.payload["temperature"] == 0
    (message,) = request.payload["messages"]
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert message["content"][1]["text"] == 'Is "OPEN", "24 h" in: a {sign}? 1-5'
    assert np.array_equal(request.picture, pixels[0].permute(1, 2, 0).numpy())
    assert "Authorization" not in request.headers


def test_judge_of_an_edit_sees_source_and_result_in_this_order() -> None:
    question = Question("Was this done: {prompt}?", lowest=0, highest=1)
    source = torch.full((3, 4, 6), 9, dtype=torch.uint8)
    prompt = Prompt("edit", "make it red", sources=(source,))
    with judging(lambda request: says("1")) as judge:
        connect(judge, question).score([prompt], torch.zeros(1, 3, 4, 6, dtype=torch.uint8))
    content = judge.requests[0].payload["messages"][0]["content"]
    kinds = ["text", "image_url", "text", "image_url", "text"]
    assert [part["type"] for part in content] == kinds
    assert content[0]["text"] == "Source:"
    assert content[2]["text"] == "Result of the edit:"
    pictures = [
        decode_png(base64.b64decode(content[place]["image_url"]["url"].partition(",")[2]))
        for place in (1, 3)
    ]
    assert [int(picture.max()) for picture in pictures] == [9, 0]


def test_judge_scores_in_the_order_of_the_pictures_with_a_bound_on_requests_in_flight() -> None:
    def later_for_the_first(request: Request) -> Reply:
        time.sleep(0.05 + 0.02 * (5 - request.level))
        return says(str(request.level))

    with judging(later_for_the_first) as judge:
        scores = score(connect(judge, requests_at_once=2), 6)
    torch.testing.assert_close(scores, torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.5]))
    assert judge.most_in_flight == 2


def test_judge_notes_the_answer_for_each_picture() -> None:
    with judging(lambda request: says(f" {request.level}.5\n")) as judge:
        scores = connect(judge).score_with_notes([DOG] * 3, PIXELS[:3])
    assert scores.notes == ("0.5", "1.5", "2.5")
    torch.testing.assert_close(scores.values, torch.tensor([0.05, 0.15, 0.25]))


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (says("I give 7. " + "x" * 300), "answered 'I give 7. x{190}'; it must be one number"),
        (says(None), "is no chat completion with a text"),
        (says(7), "is no chat completion"),
        (Reply(body=b'{"choices": []}'), "answered status 200 OK with what is no chat completion"),
        (Reply(body=b"hello"), "answered status 200 OK with what is no chat completion"),
    ],
)
def test_judge_that_gives_no_score_ends_the_step_naming_prompt_and_image(
    reply: Reply, error: str
) -> None:
    with judging(lambda request: reply if request.level == 2 else says("5")) as judge:
        reward = connect(judge)
        with pytest.raises(RewardError, match=f"prompt dog, image 2: .*{error}"):
            score(reward, 4)


def test_judge_gives_up_the_other_requests_after_a_failure() -> None:
    is_over = threading.Event()

    def hang_but_for_the_last(request: Request) -> Reply:
        if request.level < 3:
            is_over.wait(10)
        return says("no")

    with judging(hang_but_for_the_last) as judge:
        reward = connect(judge)
        started = time.monotonic()
        with pytest.raises(RewardError, match="image 3: judge-1 answered 'no'"):
            score(reward, 4)
        assert time.monotonic() - started < 5
        is_over.set()


@pytest.mark.parametrize("passing", [Reply(500), Reply(503), Reply(429), None])
def test_judge_is_asked_again_after_what_passes(passing: Reply | None) -> None:
    with judging(in_turn(passing, says("3"))) as judge:
        started = time.monotonic()
        torch.testing.assert_close(score(connect(judge, retries=1), 1), torch.tensor([0.3]))
        assert time.monotonic() - started >= 0.5
    assert len(judge.requests) == 2


def test_judge_is_given_the_time_it_asks_for() -> None:
    busy = Reply(429, headers={"Retry-After": "1"})
    with judging(in_turn(busy, says("3"))) as judge:
        reward = connect(judge, retries=1)
        started = time.monotonic()
        score(reward, 1)
        # Its own wait would be half a second; the upper bound leaves room for a busy machine.
        assert 1.0 <= time.monotonic() - started < 10


def test_judge_that_stays_busy_ends_the_step_after_the_tries() -> None:
    busy = Reply(503, b"loading", headers={"Retry-After": "0"})
    with judging(lambda request: busy) as judge:
        reward = connect(judge, retries=2)
        with pytest.raises(
            RewardError, match=r"image 0: .*status 503 Service Unavailable, Retry-After 0\."
        ):
            score(reward, 1)
    assert len(judge.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_judge_that_refuses_is_asked_once(status: int) -> None:
    with judging(lambda request: Reply(status, b"no such model")) as judge:
        reward = connect(judge, retries=3)
        with pytest.raises(
            RewardError, match=f"failed with status {status} [A-Z][a-z A-Z]+\\. Time"
        ):
            score(reward, 1)
    assert len(judge.requests) == 1


def test_judge_that_hangs_is_asked_again_and_ends_the_step() -> None:
    is_over = threading.Event()

    def hang(request: Request) -> Reply:
        is_over.wait(10)
        return says("3")

    with judging(hang) as judge:
        reward = connect(judge, retries=1, request_timeout_seconds=0.3)
        with pytest.raises(RewardError, match=r"image 0: .*no answer within 0.3 seconds"):
            score(reward, 1)
        assert len(judge.requests) == 2
        is_over.set()


def test_judge_that_cannot_be_reached_is_refused_before_anything_is_scored() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    with pytest.raises(RewardError, match=f"url {url} cannot be reached .*start the endpoint, or"):
        connect(Judge(url))


def test_judge_that_goes_away_ends_the_step() -> None:
    with judging() as judge:
        reward = connect(judge)
    with pytest.raises(RewardError, match=f"image 0: {judge.url} failed with ConnectError"):
        score(reward, 1)


def test_judge_need_not_list_its_models() -> None:
    with judging(models=Reply(404)) as judge:
        assert score(connect(judge), 2).shape == (2,)


@pytest.mark.parametrize("status", [401, 403, 500, 301])
def test_judge_that_refuses_to_list_its_models_is_refused(status: int) -> None:
    error = f"with status {status} [A-Z][a-z A-Z]+; correct the address"
    with (
        judging(models=Reply(status, b"not you")) as judge,
        pytest.raises(RewardError, match=error),
    ):
        connect(judge)


def test_judge_gets_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    with judging() as judge:
        score(connect(judge, api_key_variable="JUDGE_KEY"), 1)
    assert judge.requests[0].headers["Authorization"] == "Bearer sk-secret"


def test_key_is_in_no_note_even_if_the_endpoint_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "7.25")  # of all keys, only a number can be a valid answer
    with judging(lambda request: says("7.25")) as judge:
        reward = connect(judge, api_key_variable="JUDGE_KEY")
        scores = reward.score_with_notes([DOG], PIXELS[:1])
    assert scores.notes == ("[key]",)
    torch.testing.assert_close(scores.values, torch.tensor([0.725]))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "JUDGE_KEY is not set, or empty; export the key in it"),
        ("", "JUDGE_KEY is not set, or empty; .*, or leave api_key_variable out where none is"),
        ("sk-secret\n", "JUDGE_KEY holds a space, a line break"),
        ("sk secret", "JUDGE_KEY holds a space"),
        ("sk-sécret", "another character that no key has"),
    ],
)
def test_judge_without_a_usable_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str | None, error: str
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with judging() as judge, pytest.raises(RewardError, match=error) as caught:
        connect(judge, api_key_variable="JUDGE_KEY")
    assert not value or value.strip() not in str(caught.value)


def test_key_is_in_no_error_and_no_log_even_if_the_endpoint_repeats_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    caplog.set_level(logging.DEBUG)
    texts = []

    def keep(error: RewardError) -> str:
        texts.append("".join(traceback.format_exception(error)))
        return str(error)

    with judging(models=Reply(401, b"bad key sk-secret")) as judge:
        with pytest.raises(RewardError) as caught:
            connect(judge, api_key_variable="JUDGE_KEY")
        assert "status 401 Unauthorized" in keep(caught.value)
    cut = "x" * 195 + "sk-secret"
    replies = Reply(401, cut.encode()), Reply(200, b"sk-secret"), says(cut), says(["sk-secret"])
    with judging(in_turn(*replies)) as judge:
        reward = connect(judge, api_key_variable="JUDGE_KEY")
        for _ in replies:
            with pytest.raises(RewardError, match=r"\[key\]|x\[key'|40[01]|200 OK") as caught:
                score(reward, 1)
            keep(caught.value)
    assert not any("sk-se" in text for text in [*texts, repr(reward), caplog.text])


@pytest.mark.parametrize(
    "form",
    [
        json.dumps("sk-a/b&c"),
        '"sk-a\\/b&c"',
        "".join(f"\\u{ord(each):04x}" for each in "sk-a/b&c"),
        quote("sk-a/b&c", safe=""),
        html.escape("sk-a/b&c"),
        "".join(f"&#{ord(each)};" for each in "sk-a/b&c"),
    ],
)
def test_refusal_that_repeats_the_key_in_another_form_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-a/b&c")
    body = f"bad key {form}".encode()
    with (
        judging(models=Reply(401, body)) as judge,
        pytest.raises(RewardError, match="status 401 Unauthorized") as listed,
    ):
        connect(judge, api_key_variable="JUDGE_KEY")
    with judging(in_turn(Reply(401, body), says(f"bad key {form}"))) as judge:
        reward = connect(judge, api_key_variable="JUDGE_KEY")
        with pytest.raises(RewardError, match="status 401 Unauthorized") as refused:
            score(reward, 1)
        with pytest.raises(RewardError, match=r"bad key .*\[key\]") as answered:
            score(reward, 1)
    for error in (listed, refused, answered):
        text = "".join(traceback.format_exception(error.value))
        assert form not in text
        assert "bad key" not in text or error is answered


def test_judge_whose_list_of_models_has_no_end_is_refused() -> None:
    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for _ in range(2**12):  # 256 MiB, where it is read
                    self.wfile.write(b"x" * 2**16)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with pytest.raises(RewardError, match="more than 16777216 bytes.; start the endpoint"):
            connect(Judge(f"http://127.0.0.1:{server.server_address[1]}/v1"))
        server.shutdown()
        thread.join()


def test_judge_applies_to_prompts_that_have_what_the_question_is_about() -> None:
    with judging() as judge:
        reward = connect(judge, Question("{text}?", lowest=0, highest=10))
        assert reward.applies_to(Prompt("sign", "a sign", texts=("A",)))
        assert not reward.applies_to(DOG)
        assert connect(judge).applies_to(DOG)
        assert reward.modules() == ()
