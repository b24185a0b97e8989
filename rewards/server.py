"""A scorer as a server: one reward term behind two addresses, /info and /score.

Who asks must know a token. There is no encryption; see docs/remote_rewards.md.
"""

from __future__ import annotations

import hmac
import io
import logging
import math
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rewards.base import Reward, score_with_notes
from rewards.types import RewardError, Scores
from rewards.wire import (
    MAX_REQUEST_PIXELS,
    ScorerInfo,
    WireError,
    decode_request,
    encode_failure,
    encode_info,
    encode_scores,
)

_ANSWER_SECONDS = 30.0
_LONGEST_WAIT = 120
_BLOCK_BYTES = 2**20
_MOST_BYTES_OF_STRANGERS = 2**22
_MOST_DIGITS = 18

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a server takes of those who ask.

    Attributes:
        request_bytes: Largest request that is read: some hundred pictures of 1024 x 1024.
        request_pixels: Most pixels of all its pictures together.
        waiting_bytes: Of all requests that are read, wait or are scored, together; not less than
            `request_bytes`.
        connections: Most at a time. Each holds a thread; one more is told to come back.
        header_seconds: Longest time in which a header arrives.
        body_seconds: Longest time in which the rest arrives.
        turn_seconds: Longest time that a request waits for those before it.
    """

    request_bytes: int = 2**28
    request_pixels: int = MAX_REQUEST_PIXELS
    waiting_bytes: int = 2**29
    connections: int = 64
    header_seconds: float = 10.0
    body_seconds: float = 300.0
    turn_seconds: float = 600.0


class BusyError(Exception):
    """A request cannot be taken now, and can be sent again."""


class RewardServer(ThreadingHTTPServer):
    """Answers /info at any time, and /score one request at a time, to who knows the token.

    Args:
        reward: Scores.
        info: What it is, for whoever asks.
        address: Host and port to listen at; port 0 for any that is free.
        token: Must stand in each request, as `Authorization: Bearer TOKEN`; not empty.
        limits: What is more is refused, or asked to come back.

    Raises:
        RewardError: The address cannot be listened at.
        ValueError: The token is empty, which everyone knows.
    """

    request_queue_size = 128  # of connections that the system takes before this process does

    def __init__(
        self,
        reward: Reward,
        info: ScorerInfo,
        address: tuple[str, int],
        *,
        token: str,
        limits: Limits | None = None,
    ) -> None:
        if not token:
            raise ValueError("the token is empty; pass one that no one can guess")
        self.info = info
        self.limits = limits or Limits()
        self._token = token.encode()
        self._reward = reward
        self._free = threading.Semaphore(self.limits.connections)
        self._counts = threading.Lock()
        self._waiting, self._waiting_bytes, self._last_seconds = 0, 0, 0.0
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

    @property
    def retry_after(self) -> int:
        """Seconds after which those who wait now will have been scored, as far as one can tell."""
        return min(_LONGEST_WAIT, max(1, math.ceil(self._waiting * self._last_seconds)))

    @contextmanager
    def room_for(self, count: int) -> Iterator[None]:
        """Room for a request while it is read, waits and is scored.

        Raises:
            BusyError: There is none.
        """
        with self._counts:
            if self._waiting_bytes + count > self.limits.waiting_bytes:
                raise BusyError
            self._waiting += 1
            self._waiting_bytes += count
        try:
            yield
        finally:
            with self._counts:
                self._waiting -= 1
                self._waiting_bytes -= count

    def score(self, body: bytes) -> Scores:
        """Decode and score, after those who came before; with notes where the term takes them.

        Raises:
            BusyError: They take too long.
            InvalidScoresError: The term returned something else than one finite float32 number,
                and one note or none, per picture.
            WireError: The body is no request, or a prompt lacks what the term compares with.
                Whatever the term raises, too.
        """
        if not self._one_at_a_time.acquire(timeout=self.limits.turn_seconds):
            raise BusyError
        started = time.monotonic()
        try:
            # Here, and not while others are scored: pictures take more memory than their files.
            prompts, pixels = decode_request(body, most_pixels=self.limits.request_pixels)
            for prompt in {id(prompt): prompt for prompt in prompts}.values():
                if not self._reward.applies_to(prompt):
                    raise WireError(
                        f"has prompt {prompt.prompt_id}, which lacks what {self.info.name} "
                        f"compares a picture with ({', '.join(self.info.needs)}); leave its "
                        "pictures out"
                    )
            return score_with_notes(self._reward, prompts, pixels)
        finally:
            self._last_seconds = time.monotonic() - started
            self._one_at_a_time.release()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own while there are some; one connection more is told to come back."""
        if not self._free.acquire(blocking=False):
            self._turn_away(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """As the base class; makes room for another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """What a connection raised: that its other end is gone is of use to no one."""
        _logger.debug("%s: a connection broke", self.info.name, exc_info=True)

    def _turn_away(self, request: socket.socket) -> None:
        body = encode_failure(f"all {self.limits.connections} connections are taken")
        answer = (
            f"HTTP/1.0 503 Service Unavailable\r\nRetry-After: {self.retry_after}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        # By the thread that takes connections, which must wait for no one. What was not read when
        # it closes breaks the connection, which whoever asked takes as a reason to ask again.
        with suppress(OSError):
            request.setblocking(False)
            request.send(answer.encode() + body)
            request.recv(_BLOCK_BYTES)
        self.shutdown_request(request)


class _Arriving(io.RawIOBase):
    """What a peer sends, up to a time: a byte now and then must not hold a thread for ever."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self.allow(seconds)

    def allow(self, seconds: float) -> None:
        """From now on."""
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it came too slowly")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    server_version = "glm-grpo-scorer"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._arriving = _Arriving(self.connection, self.server.limits.header_seconds)
        self.rfile = io.BufferedReader(self._arriving)

    def do_GET(self) -> None:
        if self._is_admitted() and self._is_at("/info"):
            self._answer(HTTPStatus.OK, encode_info(self.server.info))

    def do_POST(self) -> None:
        if not (self._is_admitted() and self._is_at("/score")):
            return
        count = self._read_length()
        if count is None:
            return
        self._arriving.allow(self.server.limits.body_seconds)
        unread = count
        try:
            with self.server.room_for(count):
                body = self._read_body(count)
                if body is None:
                    return
                unread = 0
                scores = self.server.score(body)
        except BusyError:
            self._pass_over(unread, most=unread)
            text = "too many requests wait to be scored"
            headers = {"Retry-After": str(self.server.retry_after)}
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, encode_failure(text), headers)
        except WireError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"the request {error}")
        except RewardError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        # A value that was sent, such as pictures of another size than their target.
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"{type(error).__name__}: {error}")
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

    def _read_length(self) -> int | None:
        length = self.headers.get("Content-Length", "")
        if not _is_count(length):
            rule = f"Content-Length is {length!r}; it must be the number of bytes that follow"
            self._refuse(HTTPStatus.LENGTH_REQUIRED, rule)
            return None
        count, limit = int(length), self.server.limits.request_bytes
        if count > limit:
            self._arriving.allow(self.server.limits.body_seconds)
            self._pass_over(count, most=4 * limit)
            rule = f"the request has {count} bytes; at most {limit} are read: send fewer pictures"
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, rule)
            return None
        return count

    def _read_body(self, count: int) -> bytes | None:
        try:
            return self.rfile.read(count)
        except TimeoutError:
            seconds = self.server.limits.body_seconds
            rule = f"the request has not arrived within {seconds:g} seconds; send fewer pictures"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, rule)
            return None

    def _pass_over(self, count: int, *, most: int) -> None:
        # Read to the end, within reason: one who is cut off while sending hears no answer.
        left = min(count, most)
        with suppress(TimeoutError):
            while left > 0 and self.rfile.read(min(left, _BLOCK_BYTES)):
                left -= _BLOCK_BYTES

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, encode_failure(text))

    def _answer(
        self, status: HTTPStatus, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.connection.settimeout(_ANSWER_SECONDS)
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except OSError as error:
            _logger.warning("%s: whoever asked has gone (%s)", self.server.info.name, error)


def _is_count(text: str) -> bool:
    # Python reads no number of some thousand digits.
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
