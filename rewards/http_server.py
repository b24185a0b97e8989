"""Serve one reward term at two addresses, /info and /score.

Clients need a token. There is no encryption; see docs/remote_rewards.md.
"""

from __future__ import annotations

import hmac
import logging
import math
import socket
import threading
from collections.abc import Awaitable, Callable

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from rewards.base import Reward, score_checked
from rewards.messages import ScoreAnswer, ScoreRequest, ScorerInfo
from rewards.types import RewardError, describe_error
from rewards.unfinished import finished_before_exit

_PATIENCE_SECONDS = 10
"""Longest wait for running requests when the server ends."""

_logger = logging.getLogger(__name__)


def make_app(reward: Reward, info: ScorerInfo, *, token: str) -> FastAPI:
    """Make an app that answers /info at any time, and /score one request at a time, given a token.

    Args:
        token: Required in each request, as `Authorization: Bearer TOKEN`.
    """
    app = FastAPI(openapi_url=None)
    authorization = f"Bearer {token}".encode()
    # Terms are not thread-safe, and threads would not make an accelerator faster.
    turn = threading.Lock()

    # Before any body is read.
    @app.middleware("http")
    async def check_token(
        request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        given = request.headers.get("Authorization", "").encode()
        # In constant time, which does not reveal how much of a guess is right.
        if hmac.compare_digest(given, authorization):
            return await answer(request)
        refusal = "the token is missing or wrong; send the server's own as Authorization: Bearer"
        return _fail(401, f"{refusal} TOKEN")

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        return _fail(400, f"invalid request: {place}: {problem['msg']}")

    @app.get("/info")
    async def tell_info() -> ScorerInfo:
        return info

    @app.post("/score", response_model=ScoreAnswer)
    def score(request: ScoreRequest) -> object:
        try:
            with turn, finished_before_exit():
                return _score(reward, request)
        # Terms wrap libraries that raise anything, or exit; the client gets the error.
        except BaseException as error:
            _logger.exception("%s could not score", info.name)
            return _fail(500, describe_error(error))

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
    """Open a listening socket at a port, 0 for any free one; returns it and its URL."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    port = listener.getsockname()[1]
    return listener, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _score(reward: Reward, request: ScoreRequest) -> ScoreAnswer:
    prompts, pixels = request.unpack()
    for prompt in prompts:
        if not reward.applies_to(prompt):
            raise RewardError(
                f"the term does not apply to prompt {prompt.prompt_id}, which lacks what it "
                "compares an image with; leave its images out"
            )
    scores = score_checked(reward, prompts, pixels)
    answers = [None if math.isnan(value) else value for value in scores.values.tolist()]
    return ScoreAnswer(scores=tuple(answers), notes=scores.notes, objects=scores.objects)


def _fail(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status)
