"""Who can reach a scorer: this machine alone unless told otherwise, and who knows its token."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glm_grpo import cli
from rewards.build import build_reward
from rewards.config import RewardConfig
from rewards.process import ProcessReward
from rewards.remote import serve as serve_module
from rewards.remote.messages import ScorerInfo
from rewards.remote.reward import RemoteReward
from rewards.remote.serve import serve
from rewards.remote.server import RewardServer
from rewards.terms.psnr import PsnrConfig
from rewards.types import Prompt, RewardError

CPU = torch.device("cpu")
DOG = Prompt("dog", "a dog")
PIXELS = torch.ones(1, 3, 2, 2, dtype=torch.uint8)
INFO = ScorerInfo(protocol=1, name="level", needs=("prompt",))


class FakeReward:
    """Scores by the pixels."""

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(self, prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
        return pixels.float().mean(dim=(1, 2, 3))

    def modules(self) -> tuple[nn.Module, ...]:
        return ()


@contextmanager
def serving(token: str) -> Iterator[str]:
    server = RewardServer(FakeReward(), INFO, ("127.0.0.1", 0), token=token)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.url
    finally:
        server.should_exit = True
        thread.join()


def listening_addresses(process_id: int) -> list[tuple[str, int]]:
    """Where a process takes TCP connections, as Linux tells it; none of IPv6."""
    links = [link.readlink() for link in Path(f"/proc/{process_id}/fd").iterdir()]
    sockets = {str(link)[len("socket:[") : -1] for link in links if "socket" in str(link)}
    assert not _rows(process_id, "tcp6", sockets)
    return [
        (socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16))
        for address, port in _rows(process_id, "tcp", sockets)
    ]


def _rows(process_id: int, family: str, sockets: set[str]) -> list[list[str]]:
    listens = "0A"
    lines = Path(f"/proc/{process_id}/net/{family}").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return [row[1].split(":") for row in fields if row[3] == listens and row[9] in sockets]


def test_process_of_a_term_listens_nowhere() -> None:
    reward = ProcessReward(PsnrConfig(kind="psnr", weight=1.0), name="psnr", device=CPU)
    prompt = Prompt("dog", "a dog", target=PIXELS[0])
    assert reward.score([prompt], PIXELS).shape == (1,)
    assert listening_addresses(reward.process_id) == []
    reward.close()


def remote(url: str, **options: object) -> RewardConfig:
    section = {"kind": "remote", "url": url, "weight": 1.0, "retries": 0, **options}
    return RewardConfig.model_validate({"terms": {"mine": section}})


def test_remote_term_sends_the_token_of_the_variable_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLM_GRPO_REWARD_TOKEN", "of-another-scorer-of-ours")
    monkeypatch.setenv("TOKEN_OF_MINE", "the-right-one-of-several")
    with serving("the-right-one-of-several") as url:
        named = remote(url, token_variable="TOKEN_OF_MINE").terms["mine"]
        assert build_reward(named, CPU).score([DOG], PIXELS).tolist() == [1.0]
        for options in ({}, {"token_variable": None}, {"token_variable": "NOT_SET_ANYWHERE"}):
            with pytest.raises(RewardError, match="asks for a token"):
                build_reward(remote(url, **options).terms["mine"], CPU)


def test_remote_term_sends_no_token_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_GRPO_REWARD_TOKEN", "nobody-elses-business")
    with repeating({"/info": NAMED}, seen=(headers := [])) as url:
        build_reward(remote(url, token_variable=None).terms["mine"], CPU)
        build_reward(remote(url).terms["mine"], CPU)
    assert headers == ["", "Bearer nobody-elses-business"]


@contextmanager
def repeating(
    answers: dict[str, str], status: int = 200, *, seen: list[str] | None = None
) -> Iterator[str]:
    """A scorer that answers as told, with the Authorization header in the place of HEADER."""
    headers = [] if seen is None else seen

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(self.headers.get("Authorization", ""))
            body = answers[self.path].replace("HEADER", headers[-1] or "no one").encode()
            self.send_response(200 if self.path == "/info" else status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


TOKEN = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
NAMED = '{"protocol": 1, "name": "HEADER", "needs": ["prompt"]}'


def connect(url: str) -> RemoteReward:
    return RemoteReward(url, needs=("prompt",), retries=0, timeout_seconds=10.0, token=TOKEN)


def test_token_that_a_scorer_repeats_is_in_no_note() -> None:
    with repeating({"/info": NAMED, "/score": '{"scores": [1], "notes": ["I got HEADER"]}'}) as url:
        assert connect(url).score_with_notes([DOG], PIXELS).notes == ("I got Bearer [key]",)


# The second and third are quoted up to their 200th character, which lies inside the token.
@pytest.mark.parametrize("answer", ['{"scores": ["HEADER"]}', "x" * 180 + "HEADER", "[HEADER" * 6])
def test_token_that_a_scorer_repeats_is_in_no_error(answer: str) -> None:
    with repeating({"/info": NAMED, "/score": answer}) as url:
        with pytest.raises(
            RewardError, match=r"the scorer Bearer \[key\] at .* no scores"
        ) as caught:
            connect(url).score([DOG], PIXELS)
        assert TOKEN[:4] not in str(caught.value)
        assert caught.value.__cause__ is not None
        assert TOKEN[:4] not in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "info", ["x" * 180 + "HEADER", '{"protocol": "HEADER"}', NAMED.replace("prompt", "target")]
)
def test_token_that_something_repeats_as_its_info_is_in_no_error(info: str) -> None:
    with repeating({"/info": info}) as url, pytest.raises(RewardError) as caught:
        connect(url)
    assert TOKEN[:4] not in str(caught.value)


@pytest.mark.parametrize("status", [401, 418, 500])
@pytest.mark.parametrize(
    "form",
    [
        "".join(f"\\u{ord(each):04x}" for each in TOKEN),
        "".join(f"%{ord(each):02x}" for each in TOKEN),
        "".join(f"&#{ord(each)};" for each in TOKEN),
    ],
)
def test_token_that_a_refusal_repeats_in_another_form_is_in_no_error(
    form: str, status: int
) -> None:
    for answer in (f'{{"error": "no {form}"}}', f"no {form}"):
        with repeating({"/info": NAMED, "/score": answer}, status) as url:
            with pytest.raises(RewardError) as caught:
                connect(url).score([DOG], PIXELS)
            assert form not in str(caught.value)
            assert TOKEN not in str(caught.value)


def test_remote_term_takes_an_empty_variable_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_GRPO_REWARD_TOKEN", "")
    with serving("of-the-server") as url, pytest.raises(RewardError, match="no token was sent"):
        build_reward(remote(url).terms["mine"], CPU)


def test_remote_term_says_how_to_do_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "two words")
    named = remote("http://127.0.0.1:9", token_variable="TOKEN_OF_MINE").terms["mine"]
    with pytest.raises(RewardError, match="or set the term's token_variable=null where none"):
        build_reward(named, CPU)


@pytest.mark.parametrize(
    ("length", "headers", "status"),
    [
        ("9" * 5000, {}, 400),
        ("9" * 5000, {"Authorization": "Bearer of-the-server"}, 400),
        ("9" * 19, {}, 401),
        ("9" * 19, {"Authorization": "Bearer of-the-server"}, 411),
    ],
)
def test_server_answers_a_length_of_thousands_of_digits(
    length: str, headers: dict[str, str], status: int
) -> None:
    with serving("of-the-server") as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", "/score")
        for name, value in {**headers, "Content-Length": length}.items():
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == status
        connection.close()


def test_commands_listen_on_loopback_unless_told_otherwise() -> None:
    assert cli._parser().parse_args(["serve-reward", "ocr"]).host == "127.0.0.1"
    assert serve_module._parser().parse_args(["--name", "ocr"]).host == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_serve_opens_no_port_to_other_machines_without_a_token(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLM_GRPO_REWARD_TOKEN", raising=False)
    announced: list[str] = []
    with pytest.raises(RewardError, match="there is no token; export GLM_GRPO_REWARD_TOKEN"):
        serve(
            FakeReward,
            name="level",
            needs=("prompt",),
            host=host,
            port=0,
            announce=announced.append,
        )
    assert announced == []
