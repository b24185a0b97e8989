"""A scorer in another process: what it scores, and what a run says where it cannot."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from rewards.base import Need, score_checked
from rewards.build import build_reward
from rewards.config import RewardConfig
from rewards.http_client import HttpClient, NoAnswerError
from rewards.http_server import listen, make_app, make_server
from rewards.messages import ScorerInfo, make_request
from rewards.score import Scorer, Term
from rewards.terms.remote import RemoteReward
from rewards.types import Prompt, RewardError, Scores
from tests.rewards.endpoint import Endpoint, Reply, Request, answering

DOCUMENT = Path(__file__).parents[2] / "docs" / "remote_rewards.md"
DOG = Prompt("dog", "a dog")
TOKEN = "of-these-tests-only"
PIXELS = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 3, 2, 2)
EDIT = Prompt(
    "sign",
    'says "Ünï"',
    texts=("Ünï",),
    target=PIXELS[1],
    sources=(PIXELS[2],),
    metadata={"tag": "edit", "include": [{"class": "sign", "count": 1}]},
)


@dataclass
class Level:
    """Scores by a third of the pixels, and keeps the prompts it was given."""

    seen: list[Prompt] = field(default_factory=list)

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(self, prompts: Sequence[Prompt], pixels: Tensor) -> Scores:
        self.seen += prompts
        if prompts[0].prompt == "fail":
            raise ZeroDivisionError("cannot look at this")
        values = pixels.float().mean(dim=(1, 2, 3)) / 3
        if prompts[0].prompt == "nan":
            values[1] = torch.nan
        return Scores(values, tuple(f"{each.prompt}\n" for each in prompts))

    def modules(self) -> tuple[nn.Module, ...]:
        return ()


@contextmanager
def serving(scorer: Level, needs: tuple[Need, ...] = ("prompt",)) -> Iterator[str]:
    """The real server; its URL."""
    info = ScorerInfo(protocol=1, name="level", needs=needs)
    server = make_server(make_app(scorer, info, token=TOKEN))
    listener, url = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join()


def speaking(answer: Callable[[Request], Reply | None]) -> AbstractContextManager[Endpoint]:
    """A server of someone else's that answers /score by a function."""
    info = b'{"protocol": 1, "name": "level", "needs": ["prompt"]}'
    return answering(answer, to_get=Reply(body=info))


def connect(url: str, *needs: Need, **options: float | str) -> RemoteReward:
    client = HttpClient(url, **{"retries": 0, "seconds": 20.0, "key": TOKEN, **options})
    return RemoteReward(client, needs or ("prompt",))


def score(reward: RemoteReward, prompt: Prompt = DOG) -> Tensor:
    """Three images by the way of a run, whose errors name term and prompt."""
    return Scorer([Term("mine", reward, 1.0)]).score([prompt], PIXELS[None]).raw.flatten()


def request_of(prompts: list[Prompt]) -> bytes:
    return make_request(prompts, PIXELS[: len(prompts)], ()).model_dump_json().encode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_remote_scores_as_the_term_does_in_this_process_to_the_bit() -> None:
    prompts = [EDIT, DOG, DOG]
    expected = Level().score(prompts, PIXELS)
    with serving(Level()) as url:
        scores = score_checked(connect(url), prompts, PIXELS)
    assert torch.equal(scores.values, expected.values)
    assert scores.notes == expected.notes


def test_a_served_term_refuses_an_image_by_null_on_the_wire() -> None:
    class Unsure(Level):
        def score(self, prompts: Sequence[Prompt], pixels: Tensor) -> Scores:
            objects = (("dog",), (), ("2 red car", "no dog"))
            return Scores([0.25, None, 0.5], ("", "too dark", ""), objects=objects)

    with serving(Unsure()) as url:
        body, headers = json.loads(request_of([DOG] * 3)), {"Authorization": f"Bearer {TOKEN}"}
        sent = httpx.post(f"{url}/score", json=body, headers=headers, trust_env=False)
        scores = score_checked(connect(url), [DOG] * 3, PIXELS)
    assert sent.json() == {
        "scores": [0.25, None, 0.5],
        "notes": ["", "too dark", ""],
        "objects": [["dog"], [], ["2 red car", "no dog"]],
    }
    assert scores.values.isnan().tolist() == [False, True, False]
    assert scores.values[::2].tolist() == [0.25, 0.5]
    assert scores.notes == ("", "too dark", "")
    assert scores.objects == (("dog",), (), ("2 red car", "no dog"))


@pytest.mark.parametrize("needs", [("text", "target", "source"), ("prompt",)])
def test_remote_sends_the_images_that_the_scorer_compares_with(needs: tuple[Need, ...]) -> None:
    scorer = Level()
    with serving(scorer, needs) as url:
        reward = connect(url, *needs)
        assert reward.applies_to(DOG) == (needs == ("prompt",))
        reward.score([EDIT], PIXELS[:1])
    (seen,) = scorer.seen
    assert (seen.prompt_id, seen.prompt, seen.texts) == ("sign", 'says "Ünï"', ("Ünï",))
    if "target" in needs:
        assert torch.equal(seen.target, PIXELS[1])
        assert torch.equal(seen.sources[0], PIXELS[2])
    else:
        assert (seen.target, seen.sources) == (None, ())
    assert seen.metadata == EDIT.metadata
    # Servers of earlier versions refuse what they do not know.
    assert b"metadata" not in request_of([DOG])


def test_remote_refuses_a_scorer_that_compares_with_something_else() -> None:
    with (
        serving(Level()) as url,
        pytest.raises(RewardError, match=r"uses prompt, .* says prompt and target; set .*=\[prom"),
    ):
        connect(url, "prompt", "target")


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("fail", r"status 500\): ZeroDivisionError: cannot look at this"),
        ("nan", r"status 500\): image 1: returned nan"),
    ],
)
def test_a_scorer_that_fails_ends_the_step_and_lives_on(prompt: str, error: str) -> None:
    scorer = Level()
    with serving(scorer) as url:
        reward = connect(url, retries=3)
        with pytest.raises(RewardError, match=f"term mine, prompt a: .*{error}"):
            score(reward, Prompt("a", prompt))
        assert len(scorer.seen) == 3  # asked once
        assert score(reward).tolist() == pytest.approx([0, 1 / 3, 2 / 3])


def test_a_server_that_is_down_ends_the_step_with_an_error_that_names_the_term() -> None:
    with serving(Level()) as url:
        reward = connect(url)
    with pytest.raises(RewardError, match=f"mine, prompt dog: .*{url} .*/score"):
        score(reward)
    with pytest.raises(RewardError, match=f"{url} .*/info .*serve-reward"):
        connect(url)


BUSY, BROKEN, LATE = httpx.Response(503), httpx.ConnectError("refused"), httpx.ReadTimeout("late")


def asks_to_wait(value: str) -> httpx.Response:
    return httpx.Response(503, headers={"Retry-After": value})


@pytest.mark.parametrize(
    ("outcome", "repeats_failures", "waits"),
    [
        (BUSY, False, [0.5, 1.0, 2.0]),
        (BROKEN, False, [0.5, 1.0, 2.0]),
        (LATE, False, []),
        (LATE, True, [0.5, 1.0, 2.0]),
        (httpx.Response(500), False, []),
        (httpx.Response(500), True, [0.5, 1.0, 2.0]),
        (httpx.Response(401), True, []),
        (asks_to_wait("7"), False, [7.0] * 3),
        (asks_to_wait("121"), False, [120.0] * 3),
        (asks_to_wait("Wed, 21 Oct 2015 07:28:00 GMT"), False, [0.5, 1.0, 2.0]),
    ],
)
def test_client_waits_longer_each_time_or_as_asked(
    monkeypatch: pytest.MonkeyPatch,
    outcome: httpx.Response | httpx.TransportError,
    repeats_failures: bool,
    waits: list[float],
) -> None:
    def answer(self: httpx.Client, request: httpx.Request) -> httpx.Response:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    waited: list[float] = []
    monkeypatch.setattr("rewards.http_client.time.sleep", waited.append)
    monkeypatch.setattr(httpx.Client, "send", answer)
    client = HttpClient(
        "http://a", key="", seconds=1.0, retries=3, repeats_failures=repeats_failures
    )
    if isinstance(outcome, Exception):
        with pytest.raises(NoAnswerError, match=str(outcome)):
            client.request("/info")
    else:
        assert client.request("/info").status_code == outcome.status_code
    assert waited == waits


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Reply(body=b'{"scores": [1, 2]}'), r"returned a tuple, \(1.0, 2.0\)"),
        (Reply(body=b'{"scores": [1, 2, NaN]}'), "image 2: returned nan"),
        (Reply(body=b'{"scores": [1, 2, 1e39]}'), "image 2: returned inf"),
        (Reply(body=b'{"scores": [1, 2, true]}'), "valid number"),
        (Reply(body=b'{"scores": [1, 2, 3], "notes": ["a"]}'), "1 notes"),
        (Reply(body=b"<html>login</html>"), "'<html>login</html>', unlike a scorer"),
        (Reply(404, b"oops"), "status 404 and 'oops', unlike a scorer"),
    ],
)
def test_answers_that_are_no_scores_end_the_step(answer: Reply, error: str) -> None:
    with speaking(lambda request: answer) as server:
        reward = connect(server.url)
        with pytest.raises(RewardError, match=f"term mine, prompt dog.*{error}"):
            score(reward)


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"}],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/info"), ("POST", "/score")])
def test_a_server_does_nothing_without_its_token(
    method: str, path: str, headers: dict[str, str]
) -> None:
    scorer = Level()
    body = request_of([DOG] * 3)
    with serving(scorer) as url:
        answer = httpx.request(method, url + path, content=body, headers=headers, trust_env=False)
    assert answer.status_code == 401
    assert scorer.seen == []


def test_a_server_scores_in_turn_for_many_clients_and_answers_info_meanwhile() -> None:
    go_on = threading.Event()

    class Slow(Level):
        def score(self, prompts: Sequence[Prompt], pixels: Tensor) -> Scores:
            assert go_on.wait(20)
            return super().score(prompts, pixels)

    with serving(Slow()) as url, ThreadPoolExecutor(60) as pool:
        reward = connect(url)
        levels = pool.map(lambda _: reward.score([DOG], PIXELS[2:]).values[0], range(60))
        connect(url)
        go_on.set()
        assert [*levels] == pytest.approx([2 / 3] * 60)


def image_sent(png: object = None) -> dict[str, object]:
    """A request with one image."""
    sent = json.loads(request_of([DOG]))
    return {**sent, "pictures": [{"prompt": 0, "png": png}]}


@pytest.mark.parametrize(
    ("request_sent", "error"),
    [
        ({}, "body.protocol: Field required"),
        (image_sent("aGVsbG8="), r"body.pictures.0.png: .*not a PNG"),
        (image_sent(7), r"body.pictures.0.png: .*Tensor"),
        ({**json.loads(request_of([DOG])), "more": 1}, "body.more: Extra"),
    ],
)
def test_a_server_says_what_is_wrong_with_a_request(
    request_sent: dict[str, object], error: str
) -> None:
    with serving(Level()) as url:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(f"{url}/score", json=request_sent, headers=headers, trust_env=False)
    assert answer.status_code == 400
    assert re.search(error, answer.json()["error"])


def remote(url: str, **options: object) -> RewardConfig:
    section = {"kind": "remote", "url": url, "weight": 1.0, "retries": 0, **options}
    return RewardConfig.model_validate({"terms": {"mine": section}}).terms["mine"]


def test_remote_sends_the_token_of_the_variable_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_GRPO_REWARD_TOKEN", "of-another-scorer-of-ours")
    monkeypatch.setenv("TOKEN_OF_MINE", TOKEN)
    cpu = torch.device("cpu")
    with serving(Level()) as url:
        reward = build_reward(remote(url, token_variable="TOKEN_OF_MINE"), cpu)
        assert score(reward).tolist() == pytest.approx([0, 1 / 3, 2 / 3])
        for options in ({}, {"token_variable": None}):
            with pytest.raises(RewardError, match="token") as caught:
                build_reward(remote(url, **options), cpu)
            assert "of-another-scorer" not in str(caught.value)


def test_remote_talks_to_the_scorer_of_the_documentation(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(# scorer\.py.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "scorer.py").write_text(source)
    port = free_port()
    # It imports Pillow and no more: a fresh interpreter is ready at once.
    command = [sys.executable, str(tmp_path / "scorer.py"), str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            reward = connect(f"http://127.0.0.1:{port}", retries=5)
            cyan = torch.tensor([0, 255, 255], dtype=torch.uint8)[:, None, None].expand(3, 2, 2)
            prompts = [Prompt("a", "a red dog"), Prompt("b", "a blue dog")]
            assert reward.score(prompts, torch.stack([cyan, cyan])).values == (0.0, 1.0)
            with pytest.raises(RewardError, match="ValueError: 'a dog' names no colour"):
                reward.score([DOG], cyan[None])
        finally:
            process.kill()


class RedLessLetters:
    """Stands in for ImageReward and HPSv3: scores an image by its red, minus letters asked for."""

    def __init__(self, device: str = "cpu") -> None:
        assert device in ("cpu", "cuda")

    def score(self, prompt: str, image: Image.Image) -> float:
        return image.getpixel((0, 0))[0] - float(len(prompt))

    def reward(self, image_paths: list[Image.Image], prompts: list[str]) -> Tensor:
        return torch.tensor(
            [[self.score(*each), 99.0] for each in zip(prompts, image_paths, strict=True)]
        )


@pytest.mark.parametrize(
    ("name", "module", "entry"),
    [
        ("image_reward_scorer.py", "ImageReward", {"load": lambda name: RedLessLetters()}),
        ("hpsv3_scorer.py", "hpsv3", {"HPSv3RewardInferencer": RedLessLetters}),
    ],
)
def test_functions_of_the_documentation_score_by_packages_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, entry: dict[str, Any]
) -> None:
    pattern = rf"```python\n(# {re.escape(name)}.*?)```"
    (source,) = re.findall(pattern, DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / name).write_text(source)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**entry))
    options = {"kind": "custom", "weight": 1.0, "function": f"{name}:score"}
    options |= {"folder": str(tmp_path)}
    term = RewardConfig.model_validate({"terms": {"theirs": options}}).terms["theirs"]
    scores = score_checked(build_reward(term, torch.device("cpu")), [DOG] * 3, PIXELS)
    assert scores.values.tolist() == [-5.0, -4.0, -3.0]


def test_proxies_of_the_environment_are_for_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(Level()) as url:
        assert score(connect(url)).tolist() == pytest.approx([0, 1 / 3, 2 / 3])
    with pytest.raises(RewardError, match="refused"):
        connect("http://scores.example")
