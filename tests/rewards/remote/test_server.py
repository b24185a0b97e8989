from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from rewards.remote import messages
from rewards.remote import server as server_module
from rewards.remote.messages import ScorerInfo
from rewards.remote.reward import RemoteReward
from rewards.remote.server import Limits, RewardServer
from rewards.types import Prompt, RewardError, Scores

DOG = Prompt("dog", "a dog")
PIXELS = torch.arange(2, dtype=torch.uint8)[:, None, None, None].expand(2, 3, 2, 2)
TOKEN = "of-these-tests-only"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
REQUEST = messages.encode_request([DOG, DOG], PIXELS, has_targets=False)


def level(prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
    return pixels.float().mean(dim=(1, 2, 3))


@dataclass
class FakeReward:
    """Scores by a function; applies to prompts that are not called nobody."""

    function: Callable[[Sequence[Prompt], Tensor], Any] = level

    def applies_to(self, prompt: Prompt) -> bool:
        return prompt.prompt_id != "nobody"

    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Any:
        return self.function(prompts, pixels)

    def modules(self) -> tuple[nn.Module, ...]:
        return ()


@dataclass
class NotingFakeReward(FakeReward):
    """Says the same of every request."""

    notes: tuple[str, ...] = ()

    def score_with_notes(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Scores:
        return Scores(self.score(prompts, pixels), self.notes)


@contextmanager
def serving(reward: FakeReward, host: str = "127.0.0.1", **limits: float) -> Iterator[str]:
    """A real server on loopback; its URL."""
    info = ScorerInfo(protocol=1, name="level", needs=("prompt",))
    address = (host, 0)
    server = RewardServer(reward, info, address, token=TOKEN, limits=Limits(**limits))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.url
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FakeReward()) as address:
        yield address


def post(url: str, body: bytes = REQUEST) -> httpx.Response:
    return httpx.post(f"{url}/score", content=body, headers=HEADERS, trust_env=False, timeout=10)


def test_server_says_what_it_is(url: str) -> None:
    answer = httpx.get(f"{url}/info", headers=HEADERS, trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json() == {"protocol": 1, "name": "level", "needs": ["prompt"]}


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_server_listens_at_addresses_of_ipv6_too() -> None:
    with serving(FakeReward(), host="::1") as url:
        assert url.startswith("http://[::1]:")
        assert post(url).json() == {"scores": [0.0, 1.0]}


def test_server_scores(url: str) -> None:
    answer = post(url)
    assert answer.status_code == 200
    assert answer.json() == {"scores": [0.0, 1.0]}


def test_server_sends_what_the_term_notes_of_each_picture() -> None:
    with serving(NotingFakeReward(notes=("OPEN", ""))) as url:
        assert post(url).json() == {"scores": [0.0, 1.0], "notes": ["OPEN", ""]}


def test_server_refuses_another_number_of_notes_than_of_pictures() -> None:
    with serving(NotingFakeReward(notes=("OPEN",))) as url:
        answer = post(url)
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("images 0 to 1: returned 1 notes; there must be one")


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "/", 404, "no /; use GET /info or POST /score"),
        ("GET", "/info/", 404, "no /info/"),
        ("GET", "/../etc/passwd", 404, "use GET /info"),
        ("POST", "/", 404, "use GET /info or POST /score"),
        ("GET", "/score", 405, "/score is for POST"),
        ("POST", "/info", 405, "/info is for GET"),
        ("PUT", "/score", 405, "/score is for POST"),
        ("DELETE", "/info", 405, "/info is for GET"),
    ],
)
def test_server_refuses_other_paths_and_methods(
    url: str, method: str, path: str, status: int, error: str
) -> None:
    answer = httpx.request(method, url + path, headers=HEADERS, trust_env=False)
    assert answer.status_code == status
    assert error in answer.json()["error"]


class _Explosive:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (__import__("os")._exit, (1,))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "the request the message is '': Invalid JSON"),
        (pickle.dumps(_Explosive()), "Invalid JSON"),
        (REQUEST.replace(b'"protocol": 1', b'"protocol": 9'), "speaks protocol 9, and this side 1"),
    ],
)
def test_server_refuses_what_is_no_request(url: str, body: bytes, error: str) -> None:
    answer = post(url, body)
    assert answer.status_code == 400
    assert error in answer.json()["error"]


def test_server_refuses_a_request_that_does_not_say_its_length(url: str) -> None:
    def parts() -> Iterator[bytes]:
        yield REQUEST

    answer = httpx.post(f"{url}/score", content=parts(), headers=HEADERS, trust_env=False)
    assert answer.status_code == 411
    assert "Content-Length is ''" in answer.json()["error"]


def test_server_reads_requests_over_its_limit_to_the_end_and_refuses_them() -> None:
    with serving(FakeReward(), request_bytes=2**22) as url:
        # Sends the whole body before it listens, unlike httpx, and so would lose the answer.
        connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
        connection.request("POST", "/score", b"x" * 2**24, HEADERS)
        answer = connection.getresponse()
        assert answer.status == 413
        error = messages.decode_failure(answer.read())
        assert error.startswith(f"the request has {2**24} bytes; at most {2**22} are read")
        connection.close()
        assert post(url).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer ünïcode".encode()},
        {"Cookie": f"token={TOKEN}"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/info"), ("POST", "/score"), ("GET", "/docs"), ("PUT", "/score")]
)
def test_server_does_nothing_for_who_does_not_know_the_token(
    method: str, path: str, headers: dict[str, Any]
) -> None:
    scored = []
    reward = FakeReward(lambda prompts, pixels: scored.append(prompts) or level(prompts, pixels))
    with serving(reward) as url:
        answer = httpx.request(
            method, url + path, content=REQUEST, headers=headers, trust_env=False
        )
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json() == {
            "error": "the token is missing or wrong; send the server's own as Authorization: "
            "Bearer TOKEN"
        }
        assert scored == []
        assert post(url).status_code == 200
    assert len(scored) == 1


def test_server_refuses_to_be_without_a_token() -> None:
    info = ScorerInfo(protocol=1, name="level", needs=())
    with pytest.raises(ValueError, match="the token is empty"):
        RewardServer(FakeReward(), info, ("127.0.0.1", 0), token="")


def test_server_reads_little_of_what_strangers_send() -> None:
    # 64 MB promised and 5 sent: no answer would come before the rest, were it waited for.
    with serving(FakeReward(), request_bytes=2**28) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", "/score")
        connection.putheader("Content-Length", str(2**26))
        connection.endheaders(b"x" * (5 * 2**20))
        assert connection.getresponse().status == 401
        connection.close()


def test_server_scores_one_request_at_a_time_and_says_meanwhile_what_it_is() -> None:
    running, most = [], []

    def slow(prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
        running.append(1)
        most.append(len(running))
        time.sleep(0.1)
        running.pop()
        return level(prompts, pixels)

    with serving(FakeReward(slow)) as url, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(post, url) for _ in range(3)]
        while not running:
            time.sleep(0.001)
        assert httpx.get(f"{url}/info", headers=HEADERS, trust_env=False).status_code == 200
        assert not all(answer.done() for answer in answers)
        assert [answer.result().status_code for answer in answers] == [200, 200, 200]
    assert most == [1, 1, 1]


def raise_no_room(prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
    raise MemoryError("no room")


def raise_reward_error(prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
    raise RewardError("weights are missing; download them")


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (raise_no_room, "MemoryError: no room"),
        (raise_reward_error, "weights are missing; download them"),
        (lambda prompts, pixels: [0.5, 0.5], "returned a list; a term must return a torch.float32"),
        (lambda prompts, pixels: torch.zeros(3), "returned torch.float32 of shape (3,); a term"),
        (lambda prompts, pixels: torch.zeros(2).double(), "returned torch.float64 of shape (2,)"),
        (lambda prompts, pixels: torch.tensor([0.0, torch.nan]), "image 1: returned nan; a score"),
    ],
)
def test_server_tells_why_the_scorer_failed_and_goes_on(
    function: Callable[..., Any], error: str
) -> None:
    with serving(FakeReward(function)) as url:
        for _ in range(2):
            answer = post(url)
            assert answer.status_code == 500
            assert error in answer.json()["error"]


def test_server_refuses_prompts_to_which_the_term_does_not_apply(url: str) -> None:
    prompts = [DOG, Prompt("nobody", "a")]
    answer = post(url, messages.encode_request(prompts, PIXELS, has_targets=False))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.startswith("the request has prompt nobody, which lacks what level compares")


def test_server_refuses_a_port_that_is_taken(url: str) -> None:
    info = ScorerInfo(protocol=1, name="level", needs=())
    port = int(url.rpartition(":")[2])
    with pytest.raises(RewardError, match=f"cannot listen at 127.0.0.1 port {port} .*another port"):
        RewardServer(FakeReward(), info, ("127.0.0.1", port), token=TOKEN)


def raise_value_error(prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
    raise ValueError("pictures of 2 x 2 are too small")


def test_server_tells_the_sender_what_it_can_mend_and_logs_no_fault_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(FakeReward(raise_value_error)) as url:
        answer = post(url)
    assert answer.status_code == 400
    assert answer.json()["error"] == "ValueError: pictures of 2 x 2 are too small"
    assert caplog.text == ""


def slow(prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
    time.sleep(0.02)
    return level(prompts, pixels)


def test_server_answers_sixty_requests_at_once() -> None:
    with serving(FakeReward(slow)) as url, ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(post, [url] * 60))
    assert [answer.status_code for answer in answers] == [200] * 60


def test_server_that_is_full_asks_to_come_back_and_all_are_answered_in_the_end() -> None:
    with serving(FakeReward(slow), connections=8) as url, ThreadPoolExecutor(60) as pool:
        options = {"needs": ("prompt",), "retries": 20, "timeout_seconds": 60.0, "token": TOKEN}
        answers = pool.map(
            lambda _: RemoteReward(url, **options).score([DOG] * 2, PIXELS), range(60)
        )
        assert [answer.tolist() for answer in answers] == [[0.0, 1.0]] * 60


@contextmanager
def held(function: Callable[..., Any], **limits: float) -> Iterator[tuple[str, threading.Event]]:
    """A server that is scoring a request until the event is set."""
    has_begun, may_end = threading.Event(), threading.Event()

    def score(prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
        has_begun.set()
        assert may_end.wait(10)
        return function(prompts, pixels)

    with serving(FakeReward(score), **limits) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, url)
        assert has_begun.wait(10)
        try:
            yield url, may_end
        finally:
            may_end.set()
        assert first.result().status_code == 200


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"waiting_bytes": len(REQUEST) + 1}, "too many requests wait to be scored"),
        ({"turn_seconds": 0.1}, "too many requests wait to be scored"),
        ({"connections": 1}, "all 1 connections are taken"),
    ],
)
def test_server_that_has_no_room_says_when_to_come_back(
    limits: dict[str, float], error: str
) -> None:
    with held(level, **limits) as (url, may_end), ThreadPoolExecutor(1) as pool:
        answer = post(url)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json() == {"error": error}
        may_end.set()
        reward = RemoteReward(url, needs=("prompt",), retries=9, timeout_seconds=20.0, token=TOKEN)
        assert pool.submit(reward.score, [DOG] * 2, PIXELS).result().tolist() == [0.0, 1.0]


def test_slow_connections_hold_few_threads_and_for_a_short_time() -> None:
    before = threading.active_count()
    with serving(FakeReward(), connections=16, header_seconds=4.0) as url:
        host, port = url.removeprefix("http://").split(":")
        started = time.monotonic()
        connections = [socket.create_connection((host, int(port)), timeout=5) for _ in range(500)]
        most = 0
        while time.monotonic() - started < 0.8:
            most = max(most, threading.active_count() - before)
            for connection in connections[:8]:
                with suppress(OSError):
                    connection.send(b"G")  # each byte comes in time, and the header never does
            time.sleep(0.05)
        assert most <= 1  # the one that takes connections
        # Those that are too many hold nothing at all.
        assert connections[-1].recv(2**10).startswith(b"HTTP/1.1 503 ")
        # The others lose their places when their time is over, though none has closed.
        status = None
        while status != 200:
            assert time.monotonic() - started < 30
            time.sleep(0.1)
            with suppress(httpx.TransportError):  # refused before the request was read
                status = httpx.get(f"{url}/info", headers=HEADERS, trust_env=False).status_code
        for connection in connections:
            connection.close()


def test_server_does_not_wait_for_a_body_without_an_end() -> None:
    with serving(FakeReward(), body_seconds=0.3) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", "/score")
        for name, value in {**HEADERS, "Content-Length": "1000"}.items():
            connection.putheader(name, value)
        connection.endheaders(b"x")
        answer = connection.getresponse()
        assert answer.status == 408
        assert messages.decode_failure(answer.read()).startswith(
            "the request has not arrived within 0.3"
        )
        connection.close()


def test_an_answer_that_no_one_takes_holds_a_connection_for_a_short_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "_ANSWER_SECONDS", 0.5)
    reward = NotingFakeReward(notes=("x" * 2**24, ""))
    with serving(reward, connections=1) as url, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        host, port = url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: {len(REQUEST)}\r\n"
        authorization = f"Authorization: Bearer {TOKEN}\r\n\r\n"
        connection.sendall((head + authorization).encode() + REQUEST)
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert post(url).status_code == 503
        time.sleep(1.0)
        assert post(url).status_code == 200


def test_server_counts_pixels_before_it_decodes() -> None:
    """2 x 2 pixels of each of two pictures."""
    with serving(FakeReward(), request_pixels=8) as url:
        assert post(url).status_code == 200
    with serving(FakeReward(), request_pixels=7) as url:
        answer = post(url)
    assert answer.status_code == 400
    assert "has pictures of 8 pixels together; at most 7 are read" in answer.json()["error"]
