"""Serve one reward term at two addresses, /info and /score.

Clients need a token. There is no encryption; see docs/remote_rewards.md.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as AnyHTTPException

from rewards.base import Reward, score_with_notes
from rewards.remote.messages import (
    MessageError,
    ScorerInfo,
    decode_request,
    encode_failure,
    encode_info,
    encode_scores,
)
from rewards.types import describe_error

LARGEST_REQUEST = 2**28
"""Bytes; about a hundred pictures of 1024 x 1024."""

MOST_WAITING = 64
"""Largest number of waiting requests; further ones are told to come back later."""

_RETRY_AFTER = {"Retry-After": "5"}
_PATIENCE_SECONDS = 10
"""Longest wait for running requests when the server ends."""

_logger = logging.getLogger(__name__)


def make_app(reward: Reward, info: ScorerInfo, *, token: str) -> FastAPI:
    """Make an app that answers /info at any time, and /score one request at a time, given a token.

    Args:
        reward: Scores the pictures.
        info: Response to GET /info.
        token: Required in each request, as `Authorization: Bearer TOKEN`.
    """
    service = _Service(reward, info, token)
    app = FastAPI(
        openapi_url=None,
        dependencies=[Depends(service.check_token)],
        exception_handlers={AnyHTTPException: _refuse},
    )
    app.add_api_route("/info", service.tell_info)
    app.add_api_route("/score", service.score, methods=["POST"])
    return app


def make_server(app: FastAPI) -> uvicorn.Server:
    """Make a server that runs until Ctrl-C or SIGTERM, or until its `should_exit` is set."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            timeout_graceful_shutdown=_PATIENCE_SECONDS,
        )
    )


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Open a listening socket; returns it and its URL.

    Args:
        host: Address.
        port: Port; 0: any free port.

    Raises:
        OSError: It cannot listen at the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    port = listener.getsockname()[1]
    return listener, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Service:
    def __init__(self, reward: Reward, info: ScorerInfo, token: str) -> None:
        self._reward = reward
        self._info = info
        self._authorization = f"Bearer {token}".encode()
        self._waiting = 0
        # Terms are not thread-safe, and threads would not make an accelerator faster.
        self._turn = asyncio.Lock()

    async def check_token(self, request: Request) -> None:
        given = request.headers.get("Authorization", "").encode()
        # In constant time, which does not reveal how much of a guess is right.
        if not hmac.compare_digest(given, self._authorization):
            raise HTTPException(
                401,
                "the token is missing or wrong; send the server's own as Authorization: Bearer "
                "TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )

    async def tell_info(self) -> Response:
        return _json(200, encode_info(self._info))

    async def score(self, request: Request) -> Response:
        refusal = self._find_refusal(request.headers.get("Content-Length"))
        if refusal is not None:
            # To the end: a client that is cut off while sending gets no response.
            async for _ in request.stream():
                pass
            raise refusal
        self._waiting += 1
        try:
            body = await request.body()
            async with self._turn:
                return await run_in_threadpool(self._score, body)
        finally:
            self._waiting -= 1

    def _find_refusal(self, length: str | None) -> HTTPException | None:
        if length is None:
            return HTTPException(411, "there is no Content-Length; send one")
        if int(length) > LARGEST_REQUEST:
            return HTTPException(
                413,
                f"the request has {length} bytes; at most {LARGEST_REQUEST} are read: send fewer "
                "images",
            )
        if self._waiting >= MOST_WAITING:
            return HTTPException(503, "too many requests are waiting to be scored", _RETRY_AFTER)
        return None

    def _score(self, body: bytes) -> Response:
        try:
            prompts, pixels = decode_request(body)
            for prompt in {id(prompt): prompt for prompt in prompts}.values():
                if not self._reward.applies_to(prompt):
                    raise MessageError(
                        f"has prompt {prompt.prompt_id}, which lacks what {self._info.name} "
                        f"compares an image with ({', '.join(self._info.needs)}); leave its "
                        "images out"
                    )
            return _json(200, encode_scores(score_with_notes(self._reward, prompts, pixels)))
        except MessageError as error:
            return _json(400, encode_failure(f"the request {error}"))
        # Terms wrap libraries that raise anything, or exit; the client gets the error.
        except BaseException as error:
            _logger.exception("%s could not score", self._info.name)
            return _json(500, encode_failure(describe_error(error)))


async def _refuse(request: Request, error: Any) -> Response:
    return _json(error.status_code, encode_failure(error.detail), error.headers)


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
