"""A scorer as a server: one reward term behind two addresses, /info and /score.

Who asks must know a token. There is no encryption; see docs/remote_rewards.md.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from rewards.base import Reward, score_with_notes
from rewards.remote.messages import (
    MAX_REQUEST_PIXELS,
    MessageError,
    ScorerInfo,
    decode_request,
    encode_failure,
    encode_info,
    encode_scores,
)
from rewards.types import RewardError, describe_error

_ANSWER_SECONDS = 30.0
_LONGEST_WAIT = 120
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
        connections: Most at a time; one more is told to come back.
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


class RewardServer(uvicorn.Server):
    """Answers /info at any time, and /score one request at a time, to who knows the token.

    It listens once it is made, and answers while `run` runs, until `should_exit` is set or, in the
    main thread, SIGINT or SIGTERM comes.

    Args:
        reward: Scores.
        info: Answer to GET /info.
        address: Host and port to listen at; port 0 for any that is free.
        token: Must stand in each request, as `Authorization: Bearer TOKEN`; not empty.
        limits: What is more is refused, or asked to come back.
        announce: Is told the URL once requests are answered.

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
        limits: Limits | None = None,
        announce: Callable[[str], None] = lambda url: None,
    ) -> None:
        if not token:
            raise ValueError("the token is empty; pass one that no one can guess")
        self._reward = reward
        self._info = info
        self._token = token.encode()
        self.limits = limits or Limits()
        self._announce = announce
        self._waiting, self._waiting_bytes, self._last_seconds = 0, 0, 0.0
        # Terms are not made for several threads, and an accelerator is not faster for them.
        self._turn = asyncio.Lock()
        try:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            raise RewardError(
                f"cannot listen at {address[0]} port {address[1]} ({error}); choose another port, "
                "or 0 for any that is free"
            ) from error
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        protocol: Any = partial(_Connection, owner=self)
        super().__init__(
            uvicorn.Config(
                self._make_app(),
                http=protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="critical",  # errors are logged here
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=[("Connection", "close")],
                timeout_graceful_shutdown=0,
            )
        )

    @property
    def retry_after(self) -> Mapping[str, str]:
        """Says when those who wait now will have been scored, as far as one can tell."""
        seconds = min(_LONGEST_WAIT, max(1, math.ceil(self._waiting * self._last_seconds)))
        return {"Retry-After": str(seconds)}

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer until told to end."""
        with self._listener:
            super().run([self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; says so."""
        await super().startup(sockets)
        self._announce(self.url)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but what is ignored stays so, and a signal is not raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        previous = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _make_app(self) -> FastAPI:
        app = FastAPI(
            openapi_url=None,
            redirect_slashes=False,
            exception_handlers={AnyHTTPException: self._refuse, Exception: _fail},
        )
        token: Any = [Depends(self._check_token)]
        app.add_api_route("/info", self._tell_info, dependencies=token)
        app.add_api_route("/score", self._take_request, methods=["POST"], dependencies=token)
        return app

    async def _check_token(
        self,
        request: Request,
        given: Annotated[
            HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))
        ],
    ) -> None:
        # In a time that does not tell how much of a guess is right.
        if given and hmac.compare_digest(given.credentials.encode(errors="replace"), self._token):
            return
        seconds = self.limits.header_seconds
        await _pass_over(request, most=_MOST_BYTES_OF_STRANGERS, seconds=seconds)
        raise HTTPException(
            HTTPStatus.UNAUTHORIZED,
            "the token is missing or wrong; send the server's own as Authorization: Bearer TOKEN",
            {"WWW-Authenticate": "Bearer"},
        )

    async def _refuse(self, request: Request, error: Any) -> Response:
        path, text = request.url.path, error.detail
        if error.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            try:
                await self._check_token(request, await HTTPBearer(auto_error=False)(request))
            except HTTPException as stranger:
                error, text = stranger, stranger.detail
            else:
                text = f"no {path}; use GET /info or POST /score"
                if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
                    text = f"{path} is for {error.headers['Allow']}"
        return _json(error.status_code, encode_failure(text), error.headers)

    async def _tell_info(self) -> Response:
        return _json(HTTPStatus.OK, encode_info(self._info))

    async def _take_request(self, request: Request) -> Response:
        limit, seconds = self.limits.request_bytes, self.limits.body_seconds
        count = _read_length(request)
        if count is None:
            found = request.headers.get("Content-Length", "")
            raise HTTPException(
                HTTPStatus.LENGTH_REQUIRED,
                f"Content-Length is {found!r}; it must be the number of bytes that follow",
            )
        if count > limit:
            await _pass_over(request, most=4 * limit, seconds=seconds)
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the request has {count} bytes; at most {limit} are read: send fewer pictures",
            )
        if self._waiting_bytes + count > self.limits.waiting_bytes:
            await _pass_over(request, most=count, seconds=seconds)
            raise self._busy()
        self._waiting += 1
        self._waiting_bytes += count
        try:
            body = await self._read_body(request)
            async with self._own_turn():
                return await asyncio.wrap_future(_start(partial(self._score, body)))
        except asyncio.CancelledError:  # another server may be started in the place of this one
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "the server ends") from None
        finally:
            self._waiting -= 1
            self._waiting_bytes -= count

    async def _read_body(self, request: Request) -> bytes:
        seconds = self.limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                return await request.body()
        except TimeoutError as error:
            raise HTTPException(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request has not arrived within {seconds:g} seconds; send fewer pictures",
            ) from error
        except ClientDisconnect as error:  # no one is there to hear it
            raise HTTPException(HTTPStatus.BAD_REQUEST, "the request breaks off") from error

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.limits.turn_seconds):
                await self._turn.acquire()
        except TimeoutError as error:
            raise self._busy() from error
        try:
            yield
        finally:
            self._turn.release()

    def _busy(self) -> HTTPException:
        return HTTPException(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "too many requests wait to be scored",
            dict(self.retry_after),
        )

    def _score(self, body: bytes) -> Response:
        started = time.monotonic()
        try:
            # Here, and not while others are scored: pictures take more memory than their files.
            prompts, pixels = decode_request(body, most_pixels=self.limits.request_pixels)
            for prompt in {id(prompt): prompt for prompt in prompts}.values():
                if not self._reward.applies_to(prompt):
                    raise MessageError(
                        f"has prompt {prompt.prompt_id}, which lacks what {self._info.name} "
                        f"compares a picture with ({', '.join(self._info.needs)}); leave its "
                        "pictures out"
                    )
            scores = encode_scores(score_with_notes(self._reward, prompts, pixels))
        except MessageError as error:
            return _json(HTTPStatus.BAD_REQUEST, encode_failure(f"the request {error}"))
        except RewardError as error:
            return _json(HTTPStatus.INTERNAL_SERVER_ERROR, encode_failure(describe_error(error)))
        # A value that was sent, such as pictures of another size than their target.
        except ValueError as error:
            text = describe_error(error)
            return _json(HTTPStatus.BAD_REQUEST, encode_failure(text))
        # Terms wrap libraries that raise whatever they like, or exit, which would end this thread
        # alone; the client is told.
        except BaseException as error:
            _logger.exception("%s could not score", self._info.name)
            text = describe_error(error)
            return _json(HTTPStatus.INTERNAL_SERVER_ERROR, encode_failure(text))
        finally:
            self._last_seconds = time.monotonic() - started
        return _json(HTTPStatus.OK, scores)


class _Connection(H11Protocol):
    """One request; bounded in number, in the time of its header and in that of its answer."""

    def __init__(self, *args: Any, owner: RewardServer, **options: Any) -> None:
        super().__init__(*args, **options)
        self._owner = owner

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits = self._owner.limits
        if len(self.connections) <= limits.connections:
            self.loop.call_later(limits.header_seconds, self._end_without_header)
            return
        # What was not read when it closes breaks the connection, which the client takes as a
        # reason to ask again.
        body = encode_failure(f"all {limits.connections} connections are taken")
        answer = (
            "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n"
            f"Retry-After: {self._owner.retry_after['Retry-After']}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        transport.write(answer.encode() + body)
        self.connections.discard(self)
        transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.loop.call_later(_ANSWER_SECONDS, self.transport.abort)

    def _end_without_header(self) -> None:
        if self.cycle is None:
            self.transport.abort()


def _start(function: Callable[[], Response]) -> Future[Response]:
    # Not in a pool, whose threads Python waits for when it ends: a term may hang.
    future: Future[Response] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=lambda: future.set_result(function()), daemon=True).start()
    return future


async def _pass_over(request: Request, *, most: int, seconds: float) -> None:
    # Read to the end, within reason: one who is cut off while sending hears no answer.
    left = min(_read_length(request) or 0, most)
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(seconds):
            blocks = request.stream()
            while left > 0:
                left -= len(await anext(blocks))


def _read_length(request: Request) -> int | None:
    text = request.headers.get("Content-Length", "")
    # Python reads no number of some thousand digits.
    is_count = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_count else None


async def _fail(request: Request, error: Exception) -> Response:
    _logger.error("a request could not be answered", exc_info=error)
    return _json(HTTPStatus.INTERNAL_SERVER_ERROR, encode_failure(type(error).__name__))


def _json(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
