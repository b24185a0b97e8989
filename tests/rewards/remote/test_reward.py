from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from rewards.base import Need
from rewards.remote.messages import ScorerInfo
from rewards.remote.reward import LostScorerError, RemoteReward
from rewards.remote.server import RewardServer
from rewards.types import Prompt, RewardError, Scores

DOCUMENT = Path(__file__).parents[3] / "docs" / "remote_rewards.md"

INFO = b'{"protocol": 1, "name": "level", "needs": ["prompt"]}'
DOG = Prompt("dog", "a dog")
TOKEN = "of-these-tests-only"
PIXELS = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 3, 2, 2)

Answer = tuple[int, bytes] | None
"""Status and body; None to break the connection."""


@dataclass
class FakeReward:
    """Scores by a third of the pixels, and keeps the prompts it was given."""

    seen: list[Prompt] = field(default_factory=list)

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Tensor:
        self.seen += prompts
        if prompts[0].prompt == "fail":
            raise ValueError("cannot look at this")
        return pixels.float().mean(dim=(1, 2, 3)) / 3

    def modules(self) -> tuple[nn.Module, ...]:
        return ()


class NotingFakeReward(FakeReward):
    """Notes the prompt and the grey of each picture."""

    def score_with_notes(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Scores:
        greys = pixels[:, 0, 0, 0].tolist()
        notes = tuple(f"{each.prompt}\n{grey}" for each, grey in zip(prompts, greys, strict=True))
        return Scores(self.score(prompts, pixels), notes)


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serving(reward: FakeReward, needs: tuple[Need, ...] = ("prompt",)) -> Iterator[str]:
    """The real server; its URL."""
    info = ScorerInfo(protocol=1, name="level", needs=needs)
    server = RewardServer(reward, info, ("127.0.0.1", 0), token=TOKEN)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.url
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def answering(
    answers: Sequence[Answer], *, info: bytes = INFO, delay: float = 0.0
) -> Iterator[tuple[str, list[str]]]:
    """A server that answers /score as told, the last answer for ever; its URL and what it got."""
    paths: list[str] = []
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.reply((200, info))

        def do_POST(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(delay)
            self.reply(left.pop(0) if len(left) > 1 else left[0])

        def reply(self, answer: Answer) -> None:
            if answer is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(answer[1])))
            self.end_headers()
            self.wfile.write(answer[1])

        def log_message(self, format: str, *args: object) -> None:
            pass

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url, paths


def connect(
    url: str, *, needs: tuple[Need, ...] = ("prompt",), token: str = TOKEN, **options: float
) -> RemoteReward:
    options = {"retries": 0, "timeout_seconds": 10.0, **options}
    return RemoteReward(url, needs=needs, token=token, **options)


def score(reward: RemoteReward) -> Tensor:
    return reward.score([DOG] * 3, PIXELS)


def scores(*values: object) -> bytes:
    return json.dumps({"scores": values}).encode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_remote_returns_what_the_scorer_returns_to_the_bit() -> None:
    with serving(FakeReward()) as url:
        reward = connect(url)
        assert torch.equal(score(reward), torch.tensor([0.0, 1.0, 2.0]) / 3)
        single = [reward.score([DOG], picture[None]) for picture in PIXELS]
        assert torch.equal(torch.cat(single), score(reward))
        assert reward.modules() == ()


def test_remote_returns_what_the_scorer_notes_in_the_order_of_the_pictures() -> None:
    prompts = [Prompt("b", 'says "Ünï" ☂'), DOG, DOG]
    with serving(NotingFakeReward()) as url:
        scores = connect(url).score_with_notes(prompts, PIXELS)
    assert scores.notes == ('says "Ünï" ☂\n0', "a dog\n1", "a dog\n2")
    assert torch.equal(scores.values, torch.tensor([0.0, 1.0, 2.0]) / 3)


def test_remote_returns_no_notes_of_a_scorer_that_takes_none() -> None:
    with serving(FakeReward()) as url:
        assert connect(url).score_with_notes([DOG] * 3, PIXELS).notes == ()


@pytest.mark.parametrize(("needs", "is_sent"), [(("text", "target"), True), (("text",), False)])
def test_remote_sends_targets_to_scorers_that_look_at_them(
    needs: tuple[Need, ...], is_sent: bool
) -> None:
    scorer = FakeReward()
    prompt = Prompt("sign", "a sign", texts=("A",), target=PIXELS[1])
    with serving(scorer, needs) as url:
        reward = connect(url, needs=needs)
        reward.score([prompt], PIXELS[:1])
    (seen,) = scorer.seen
    assert (seen.prompt_id, seen.prompt, seen.texts) == ("sign", "a sign", ("A",))
    assert (seen.target is not None and torch.equal(seen.target, PIXELS[1])) == is_sent


def test_remote_applies_to_prompts_that_have_what_the_scorer_looks_at() -> None:
    with serving(FakeReward(), ("text",)) as url:
        reward = connect(url, needs=("text",))
    assert reward.applies_to(Prompt("sign", "a sign", texts=("A",)))
    assert not reward.applies_to(DOG)


@pytest.mark.parametrize(
    ("needs", "error"),
    [
        ((), r"level at .* uses prompt, .* says the picture alone; set .*of_prompt=\[prompt\]"),
        (("target", "prompt"), r"uses prompt, .*says prompt and target"),
    ],
)
def test_remote_refuses_a_scorer_that_looks_at_something_else(
    needs: tuple[Need, ...], error: str
) -> None:
    with serving(FakeReward()) as url, pytest.raises(RewardError, match=error):
        connect(url, needs=needs)


def test_remote_passes_on_why_the_scorer_failed_and_asks_once() -> None:
    scorer = FakeReward()
    with serving(scorer) as url:
        reward = connect(url, retries=3)
        with pytest.raises(RewardError, match="failed .*400.*: ValueError: cannot look at this"):
            reward.score([Prompt("a", "fail")], PIXELS[:1])
    assert len(scorer.seen) == 1


@pytest.mark.parametrize("passing", [(502, b""), (503, b"busy"), (504, b""), None])
def test_remote_tries_again_after_what_passes(passing: Answer) -> None:
    with answering([passing, (200, scores(1, 2, 3))]) as (url, paths):
        started = time.monotonic()
        assert score(connect(url, retries=1)).tolist() == [1.0, 2.0, 3.0]
        assert time.monotonic() - started >= 0.5
    assert paths == ["/info", "/score", "/score"]


@pytest.mark.parametrize("status", [500, 501, 404, 429])
def test_remote_does_not_try_again_after_what_stays(status: int) -> None:
    with answering([(status, b"oops")]) as (url, paths):
        reward = connect(url, retries=3)
        with pytest.raises(RewardError, match=f"answered status {status} [A-Z].*; .* no scorer"):
            score(reward)
    assert paths == ["/info", "/score"]


def test_remote_gives_up_after_its_tries_with_the_reason() -> None:
    with answering([None]) as (url, paths):
        reward = connect(url, retries=1)
        with pytest.raises(LostScorerError, match=f"{url} cannot be reached .*Error: .*start it"):
            score(reward)
    assert paths == ["/info", "/score", "/score"]


@pytest.mark.parametrize(
    ("token", "found"), [("", "no token was sent"), ("another one", "that was sent is not its own")]
)
def test_remote_says_which_variable_the_token_of_the_scorer_belongs_in(
    token: str, found: str
) -> None:
    scorer = FakeReward()
    with (
        serving(scorer) as url,
        pytest.raises(RewardError, match=f"asks for a token, .*{found}; .*GLM_GRPO_REWARD_TOKEN"),
    ):
        connect(url, token=token, retries=3)
    assert scorer.seen == []


def test_remote_repeats_its_token_in_no_error() -> None:
    for status in (500, 418):
        with answering([(status, json.dumps({"error": f"bad {TOKEN}"}).encode())]) as (url, _):
            with pytest.raises(RewardError, match=r"bad \[key\]") as caught:
                score(connect(url))
            assert TOKEN not in str(caught.value)


def test_remote_asks_a_scorer_that_hangs_once() -> None:
    with answering([(200, scores(1, 2, 3))], delay=0.6) as (url, paths):
        reward = connect(url, retries=3, timeout_seconds=0.2)
        with pytest.raises(LostScorerError, match=r"no answer to /score within 0.2 seconds"):
            score(reward)
    assert paths == ["/info", "/score"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (scores(1, 2), "2 scores for 3 pictures; there must be one number per picture"),
        (scores(1, 2, 3, 4), "4 scores for 3 pictures"),
        (b'{"scores": [1, 2, 3], "notes": ["a", "b"]}', "2 notes for 3 pictures; there must be"),
        (b'{"scores": [1, 2, 3], "notes": ["a", "b", 5]}', "notes.2 is '5': .* valid string"),
        (b'{"scores": [1, 2, NaN]}', "scores.2 is 'nan': Input should be a finite number"),
        (scores(1, "2", 3), "scores.1 is '2': Input should be a valid number"),
        (scores(1, None, 3), "scores.1 is 'None'"),
        (b"fine, thank you", "the message is 'fine, thank you': Invalid JSON"),
    ],
)
def test_remote_refuses_answers_that_are_no_scores(body: bytes, error: str) -> None:
    with answering([(200, body)]) as (url, _):
        reward = connect(url)
        with pytest.raises(RewardError, match=f"level at {url} answered what .*{error}.*Correct"):
            score(reward)


@pytest.mark.parametrize(
    ("info", "error"),
    [
        (b"<html>It works!</html>", "/info is not that of a scorer: the message is '<html>It wor"),
        (b'{"protocol": 2, "name": "a", "needs": []}', "speaks protocol 2, and this side 1; run"),
    ],
)
def test_remote_refuses_what_is_no_scorer(info: bytes, error: str) -> None:
    with answering([None], info=info) as (url, _), pytest.raises(RewardError, match=error):
        connect(url)


def test_remote_refuses_a_port_where_nothing_listens() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RewardError, match=f"{url} cannot be reached .*ConnectError.*serve-reward"):
        connect(url)


def test_remote_keeps_the_path_of_an_address() -> None:
    with answering([None]) as (url, paths):
        connect(f"{url}/scorers/")
    assert paths == ["/scorers/info"]


def test_remote_refuses_an_address_that_is_none() -> None:
    with pytest.raises(RewardError, match="url 'http://host:port' is none"):
        connect("http://host:port")


def test_remote_reaches_this_machine_past_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(FakeReward()) as url:
        assert score(connect(url)).shape == (3,)


def test_remote_talks_to_the_scorer_of_the_documentation(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(# scorer\.py.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "scorer.py").write_text(source)
    port = free_port()
    command = [sys.executable, str(tmp_path / "scorer.py"), str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            reward = connect(f"http://127.0.0.1:{port}", retries=4)
            cyan = torch.tensor([0, 255, 255], dtype=torch.uint8)[:, None, None].expand(3, 2, 2)
            prompts = [Prompt("a", "a red dog"), Prompt("b", "a blue dog")]
            assert reward.score(prompts, torch.stack([cyan, cyan])).tolist() == [0.0, 1.0]
            with pytest.raises(RewardError, match="ValueError: 'a dog' names no colour"):
                reward.score([DOG], cyan[None])
        finally:
            process.kill()
