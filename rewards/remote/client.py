"""The client of every term that asks over HTTP: its key, its bounds, when it asks again."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import re
import ssl
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from rewards.secrets import hide_value
from rewards.types import RewardError, describe_error

MAX_ANSWER_BYTES = 2**24
"""Longest answer that is read: scores and notes of some thousand pictures are smaller."""

T = TypeVar("T")

_CONNECT_SECONDS = 10.0
_KEY = re.compile("[!-~]+")
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 120.0


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine, also where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()


@dataclass(frozen=True)
class RetryRules:
    """When a request is tried again, and after how long.

    Attributes:
        retries: Further tries, >= 0.
        statuses: Of answers after which it is tried again.
        errors: Failures after which it is tried again.
    """

    retries: int
    statuses: frozenset[int]
    errors: tuple[type[httpx.RequestError], ...]

    def wait_after(self, outcome: httpx.Response | httpx.RequestError, tries: int) -> float | None:
        """Seconds to wait before the next try; None where there is none.

        The waits are 0.5, 1, 2, ... seconds, or what the answer's Retry-After asks for. One that
        asks for more than two minutes is not tried again.

        Args:
            tries: How many there were, >= 1.
        """
        if tries > self.retries or not self._is_passing(outcome):
            return None
        asked = None if isinstance(outcome, Exception) else _read_retry_after(outcome)
        wait = _FIRST_WAIT * 2 ** (tries - 1) if asked is None else asked
        return wait if wait <= _LONGEST_WAIT else None

    def _is_passing(self, outcome: httpx.Response | httpx.RequestError) -> bool:
        if isinstance(outcome, httpx.Response):
            return outcome.status_code in self.statuses
        return isinstance(outcome, self.errors)


def open_client(url: str, *, key: str, verify: ssl.SSLContext | bool = True) -> httpx.AsyncClient:
    """The client of every request to an endpoint or a scorer; its bounds are those of `ask`.

    Args:
        url: Asks the environment for a proxy, unless it is this machine's own.
        key: Is sent as bearer token; "" for none.
        verify: Certificates of authorities, where they have been read before.

    Raises:
        RewardError: The URL is none.
    """
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        # No time limit of its own: httpx counts each read, and an answer can come byte by byte.
        timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
        trust_env=uses_environment(url),
        verify=verify,
    )


async def ask(
    client: httpx.AsyncClient, request: httpx.Request, rules: RetryRules, *, seconds: float
) -> httpx.Response | httpx.RequestError:
    """Send a request, again where the rules say so, and read the last answer.

    Args:
        client: Of `open_client`.
        request: Can be sent more than once.
        rules: See there.
        seconds: Longest time of one try, from the first byte that is sent to the last that comes.

    Returns:
        The answer, with status, body and Retry-After alone; or why there is none: it cannot be
        sent, took too long, or the answer is broken, compressed, or longer than `MAX_ANSWER_BYTES`.
    """
    # A few bytes can be a thousand times as many once they are decompressed.
    request.headers["Accept-Encoding"] = "identity"
    for tries in itertools.count(1):
        outcome: httpx.Response | httpx.RequestError
        try:
            async with asyncio.timeout(seconds):
                outcome = await _send(client, request)
        except TimeoutError:
            outcome = httpx.ReadTimeout(f"no answer within {seconds:g} seconds")
        except httpx.RemoteProtocolError:
            # httpx's own text quotes what came, in which the key may stand.
            outcome = httpx.RemoteProtocolError("the answer breaks off, or is no HTTP")
        except httpx.RequestError as error:
            outcome = error
        wait = rules.wait_after(outcome, tries)
        if wait is None:
            break
        await asyncio.sleep(wait)
    return outcome


async def _send(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    answer = await client.send(request, stream=True)
    body = bytearray()
    try:
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise httpx.DecodingError("the answer is compressed, which was not asked for")
        async for block in answer.aiter_raw():
            body += block
            if len(body) > MAX_ANSWER_BYTES:
                raise httpx.DecodingError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    finally:
        await answer.aclose()
    kept = {name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers}
    return httpx.Response(answer.status_code, headers=kept, content=bytes(body), request=request)


def read_key(variable: str, *, option: str, remedy: str) -> str:
    """The key in an environment variable.

    Args:
        variable: Its name.
        option: Of the config, that names it; for errors.
        remedy: What else the user can do than export it.

    Raises:
        RewardError: It is not set, or what it holds is no key.
    """
    key = os.environ.get(variable, "")
    if not _KEY.fullmatch(key):
        found = (
            "holds a space, a line break or another character that no key has"
            if key
            else "is not set, or empty"
        )
        raise RewardError(
            f"{option}: the environment variable {variable} {found}; export the key in it, or "
            f"{remedy}"
        )
    return key


def uses_environment(url: str) -> bool:
    """Whether proxies that the environment names are used: not for this machine's own addresses.

    Raises:
        RewardError: The URL is none.
    """
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL as error:
        raise RewardError(f"url {url!r} is none ({error}); write http://host:port") from error
    return not (host in {"localhost", "::1"} or host.startswith("127."))


def describe(outcome: httpx.Response | httpx.RequestError, *, secret: str = "") -> str:
    """What came of a request, for an error: the failure, or the status.

    Nothing that the other side wrote is repeated, in which the key may stand in any form: not the
    body, and not its own words for the status.

    Args:
        secret: Is left out, wherever it stands; "" for none.
    """
    if isinstance(outcome, httpx.RequestError):
        return hide(describe_error(outcome), secret)
    wait = _read_retry_after(outcome)
    patience = "" if wait is None else f", Retry-After {wait:.0f}"
    phrase = httpx.codes.get_reason_phrase(outcome.status_code)
    return f"status {outcome.status_code} {phrase}".rstrip() + patience


def hide(text: str, secret: str) -> str:
    """The text without a secret; to be called before a text is cut, which could cut the secret."""
    return hide_value(text, secret, "[key]")


def _read_retry_after(answer: httpx.Response) -> float | None:
    """Seconds from now, whether the header holds a number or a date; None without a usable one."""
    text = answer.headers.get("Retry-After", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        # A date without a zone has no difference to one with a zone.
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
