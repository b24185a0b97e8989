"""A scorer as a server: one reward term behind two addresses, /info and /score.

python -m rewards.serve --name NAME --options-json '{"kind": ...}' [--host] [--port] [--device]

It listens on this machine only unless told otherwise: there is no password and no encryption.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType

import torch
from jaxtyping import Float32, UInt8
from pydantic import ValidationError
from torch import Tensor

from rewards.base import Reward
from rewards.build import build_reward
from rewards.config import RewardConfig
from rewards.terms_config import Need, TermConfig
from rewards.types import Prompt, RewardError
from rewards.wire import (
    PROTOCOL,
    ScorerInfo,
    WireError,
    decode_request,
    encode_failure,
    encode_info,
    encode_scores,
)

MAX_REQUEST_BYTES = 2**28
"""Largest request that is read: some hundred pictures of 1024 x 1024."""

LOOPBACK = "127.0.0.1"
"""The address that only this machine can reach."""

_SOCKET_SECONDS = 60.0
_BLOCK_BYTES = 2**20
_STDIN = 0

_logger = logging.getLogger(__name__)


class RewardServer(ThreadingHTTPServer):
    """Answers /info at any time, and /score one request at a time.

    Args:
        reward: Scores.
        info: What it is, for whoever asks.
        address: Host and port to listen at; port 0 for any that is free.
        max_request_bytes: Larger requests are refused.

    Raises:
        RewardError: The address cannot be listened at.
    """

    def __init__(
        self,
        reward: Reward,
        info: ScorerInfo,
        address: tuple[str, int],
        *,
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        self.info = info
        self.max_request_bytes = max_request_bytes
        self._reward = reward
        # Terms are not made for several threads, and an accelerator is not faster for them.
        self._one_at_a_time = threading.Lock()
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise RewardError(
                f"cannot listen at {address[0]} port {address[1]} ({error}); choose another port, "
                "or 0 for any that is free"
            ) from error

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def server_bind(self) -> None:
        """Bind without asking a name server for the host's name, which can take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Score, after those who came before.

        Raises:
            RewardError: A prompt lacks what the term compares with, or the term returned something
                else than one finite float32 number per picture. Whatever the term raises, too.
        """
        with self._one_at_a_time:
            for prompt in {id(prompt): prompt for prompt in prompts}.values():
                if not self._reward.applies_to(prompt):
                    raise RewardError(
                        f"prompt {prompt.prompt_id} lacks what {self.info.name} compares a picture "
                        f"with ({', '.join(self.info.needs)}); leave its pictures out"
                    )
            return _check_scores(self._reward.score(prompts, pixels), count=len(prompts))


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    timeout = _SOCKET_SECONDS  # a peer that says nothing must not hold a thread for ever
    server_version = "glm-grpo-scorer"
    sys_version = ""

    def do_GET(self) -> None:
        if self._is_at("/info"):
            self._answer(HTTPStatus.OK, encode_info(self.server.info))

    def do_POST(self) -> None:
        if not self._is_at("/score"):
            return
        body = self._read_body()
        if body is None:
            return
        try:
            scores = self.server.score(*decode_request(body))
        except WireError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"the request {error}")
        except RewardError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        # Terms wrap libraries that raise whatever they like; whoever asked is told.
        except Exception as error:
            _logger.exception("%s could not score", self.server.info.name)
            text = f"{type(error).__name__}: {error}"
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        else:
            self._answer(HTTPStatus.OK, encode_scores(scores))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses (unknown methods, broken requests), as JSON."""
        self._refuse(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are of use to those who look for a fault only."""
        _logger.debug(format, *args)

    def _is_at(self, path: str) -> bool:
        if self.path == path:
            return True
        other = {"/info": "GET", "/score": "POST"}.get(self.path)
        if other is not None:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, f"{self.path} is for {other}")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"no {self.path}; use GET /info or POST /score")
        return False

    def _read_body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            rule = f"Content-Length is {length!r}; it must be the number of bytes that follow"
            self._refuse(HTTPStatus.LENGTH_REQUIRED, rule)
            return None
        count, limit = int(length), self.server.max_request_bytes
        if count > limit:
            # Read to the end, within reason: one who is cut off while sending hears no answer.
            left = min(count, 4 * limit)
            while left > 0 and self.rfile.read(min(left, _BLOCK_BYTES)):
                left -= _BLOCK_BYTES
            rule = f"the request has {count} bytes; at most {limit} are read: send fewer pictures"
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, rule)
            return None
        return self.rfile.read(count)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, encode_failure(text))

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError as error:
            _logger.warning("%s: whoever asked has gone (%s)", self.server.info.name, error)


def serve(
    reward: Reward,
    *,
    name: str,
    needs: Sequence[Need],
    host: str,
    port: int,
    announce: Callable[[str], None],
) -> None:
    """Serve a reward until Ctrl-C or SIGTERM, from the main thread, which alone signals reach.

    Args:
        reward: Scores.
        name: For errors and people.
        needs: What of a prompt it looks at.
        host: Address to listen at; any but a loopback one can be reached by others, see above.
        port: 0 for any that is free.
        announce: Is told the URL once requests are taken.

    Raises:
        RewardError: The address cannot be listened at.
    """
    info = ScorerInfo(protocol=PROTOCOL, name=name, needs=tuple(needs))
    with RewardServer(reward, info, (host, port)) as server, _ended_by_signals(server.shutdown):
        if not host.startswith("127.") and host != "localhost":
            _logger.warning("%s: everyone who can reach %s can use this scorer", name, server.url)
        announce(server.url)
        server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the term of the command line, and serve it; exit code 1 where it cannot be built."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    options = _parser().parse_args(arguments)
    if options.end_with_stdin:
        # A signal to the whole group of processes (Ctrl-C, a scheduler's notice) asks the run to
        # end after its step, for which it needs this scorer; the run says when it is done.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        term = _read_term(options.name, options.options_json)
        reward = build_reward(term, torch.device(options.device))
        serve(
            reward,
            name=options.name,
            needs=term.needs(),
            host=options.host,
            port=options.port,
            announce=_announce,
        )
    except (RewardError, ValidationError) as error:
        sys.exit(f"{options.name}: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rewards.serve", description="Serve a scorer.")
    parser.add_argument("--name", required=True, help="name of the term, or of its kind")
    parser.add_argument("--options-json", default="{}", help="its section of the config, as JSON")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen at")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--device", default="cpu", help="where networks are put, such as cuda:0")
    parser.add_argument(
        "--end-with-stdin",
        action="store_true",
        help="end when standard input is closed, and at no signal: for a parent process",
    )
    return parser


def _read_term(name: str, text: str) -> TermConfig:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise RewardError(
            f"--options-json {text!r} is no JSON ({error}); quote it whole"
        ) from error
    if not isinstance(options, Mapping):
        raise RewardError(f"--options-json is {text!r}; it must be an object, as {{}}")
    # The term is scored here and weighed elsewhere: any weight that is allowed will do, and no
    # third process is wanted.
    section = {name: {**options, "weight": 1.0, "run_in": "thread"}}
    return RewardConfig.model_validate({"terms": section, "allow_untied": True}).terms[name]


def _announce(url: str) -> None:
    sys.stdout.write(f"listening on {url}\n")
    sys.stdout.flush()


def _end_with_stdin() -> None:
    # Not through sys.stdin, whose lock this thread would hold when the interpreter shuts down.
    while os.read(_STDIN, _BLOCK_BYTES):
        pass
    # At once: whoever would have read an answer is gone, and there is nothing to save.
    os._exit(0)


def _check_scores(scores: object, *, count: int) -> Float32[Tensor, " N"]:
    if not isinstance(scores, Tensor):
        raise RewardError(
            f"the term returned a {type(scores).__name__}; it must return a torch.float32 tensor "
            "with one number per picture, such as torch.tensor(scores)"
        )
    if (scores.shape, scores.dtype) != ((count,), torch.float32):
        raise RewardError(
            f"the term returned {scores.dtype} of shape {tuple(scores.shape)}; it must return "
            f"torch.float32 of shape ({count},), one number per picture"
        )
    scores = scores.cpu()
    for index in (~torch.isfinite(scores)).nonzero().flatten().tolist():
        raise RewardError(
            f"the term returned {scores[index].item()} for picture {index} of the request; a score "
            "must be a finite number. A term that cannot score must raise"
        )
    return scores


@contextmanager
def _ended_by_signals(shutdown: Callable[[], None]) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        # The main thread is in serve_forever, for whose end `shutdown` waits.
        threading.Thread(target=shutdown, daemon=True).start()

    # What whoever started this process told it to ignore, it goes on to ignore.
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
