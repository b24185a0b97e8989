"""A scorer as a server: one reward term behind two addresses, /info and /score.

Who asks must know a token. There is no encryption; see docs/remote_rewards.md.
"""

from __future__ import annotations

import hmac
import logging
import socketserver
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jaxtyping import UInt8
from torch import Tensor

from rewards.base import Reward, score_with_notes
from rewards.types import Prompt, RewardError, Scores
from rewards.wire import (
    ScorerInfo,
    WireError,
    decode_request,
    encode_failure,
    encode_info,
    encode_scores,
)

MAX_REQUEST_BYTES = 2**28
"""Largest request that is read: some hundred pictures of 1024 x 1024."""

_SOCKET_SECONDS = 60.0
_BLOCK_BYTES = 2**20
_MOST_BYTES_OF_STRANGERS = 2**22
_MOST_DIGITS = 18

_logger = logging.getLogger(__name__)


class RewardServer(ThreadingHTTPServer):
    """Answers /info at any time, and /score one request at a time, to who knows the token.

    Args:
        reward: Scores.
        info: What it is, for whoever asks.
        address: Host and port to listen at; port 0 for any that is free.
        token: Must stand in each request, as `Authorization: Bearer TOKEN`; not empty.
        max_request_bytes: Larger requests are refused.

    Raises:
        RewardError: The address cannot be listened at.
        ValueError: The token is empty, which everyone knows.
    """

    def __init__(
        self,
        reward: Reward,
        info: ScorerInfo,
        address: tuple[str, int],
        *,
        token: str,
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        if not token:
            raise ValueError("the token is empty; pass one that no one can guess")
        self.info = info
        self.max_request_bytes = max_request_bytes
        self._token = token.encode()
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

    def admits(self, authorization: str) -> bool:
        """Whether a header holds the token."""
        scheme, _, token = authorization.partition(" ")
        # In a time that does not tell how much of a guess is right.
        is_own = hmac.compare_digest(token.strip().encode(errors="replace"), self._token)
        return is_own and scheme.lower() == "bearer"

    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Score, after those who came before; with notes where the term takes them.

        Raises:
            InvalidScoresError: The term returned something else than one finite float32 number,
                and one note or none, per picture.
            RewardError: A prompt lacks what the term compares with. Whatever the term raises, too.
        """
        with self._one_at_a_time:
            for prompt in {id(prompt): prompt for prompt in prompts}.values():
                if not self._reward.applies_to(prompt):
                    raise RewardError(
                        f"prompt {prompt.prompt_id} lacks what {self.info.name} compares a picture "
                        f"with ({', '.join(self.info.needs)}); leave its pictures out"
                    )
            return score_with_notes(self._reward, prompts, pixels)


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    timeout = _SOCKET_SECONDS  # a peer that says nothing must not hold a thread for ever
    server_version = "glm-grpo-scorer"
    sys_version = ""

    def do_GET(self) -> None:
        if self._is_admitted() and self._is_at("/info"):
            self._answer(HTTPStatus.OK, encode_info(self.server.info))

    def do_POST(self) -> None:
        if not (self._is_admitted() and self._is_at("/score")):
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
        # Terms wrap libraries that raise whatever they like, or exit, which would end this thread
        # alone; whoever asked is told.
        except BaseException as error:
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

    def _is_admitted(self) -> bool:
        if self.server.admits(str(self.headers.get("Authorization", ""))):
            return True
        length = self.headers.get("Content-Length", "")
        self._pass_over(int(length) if _is_count(length) else 0, most=_MOST_BYTES_OF_STRANGERS)
        rule = "the token is missing or wrong; send the server's own as Authorization: Bearer TOKEN"
        self._answer(HTTPStatus.UNAUTHORIZED, encode_failure(rule), {"WWW-Authenticate": "Bearer"})
        return False

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
        if not _is_count(length):
            rule = f"Content-Length is {length!r}; it must be the number of bytes that follow"
            self._refuse(HTTPStatus.LENGTH_REQUIRED, rule)
            return None
        count, limit = int(length), self.server.max_request_bytes
        if count > limit:
            self._pass_over(count, most=4 * limit)
            rule = f"the request has {count} bytes; at most {limit} are read: send fewer pictures"
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, rule)
            return None
        return self.rfile.read(count)

    def _pass_over(self, count: int, *, most: int) -> None:
        # Read to the end, within reason: one who is cut off while sending hears no answer.
        left = min(count, most)
        while left > 0 and self.rfile.read(min(left, _BLOCK_BYTES)):
            left -= _BLOCK_BYTES

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, encode_failure(text))

    def _answer(
        self, status: HTTPStatus, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError as error:
            _logger.warning("%s: whoever asked has gone (%s)", self.server.info.name, error)


def _is_count(text: str) -> bool:
    # Python reads no number of some thousand digits.
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
