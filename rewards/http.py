"""What every term that asks over HTTP needs: its key, when to ask again, how to say what came."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from rewards.types import RewardError
from rewards.wire import EXCERPT

MAX_ANSWER_BYTES = 2**24
"""Longest answer that is read: scores and notes of some thousand pictures are smaller."""

_KEY = re.compile("[!-~]+")
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 120.0


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
            outcome: Of the last try.
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


async def send(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Send a request and read the answer, up to a limit.

    Raises:
        httpx.RequestError: It cannot be sent; or the answer is broken, compressed, or longer than
            `MAX_ANSWER_BYTES`.
    """
    # A few bytes can be a thousand times as many once they are decompressed.
    request.headers["Accept-Encoding"] = "identity"
    answer = await client.send(request, stream=True)
    body = bytearray()
    try:
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise httpx.DecodingError(
                f"the answer is compressed ({encoding}), which was not asked for", request=request
            )
        async for block in answer.aiter_raw():
            body += block
            if len(body) > MAX_ANSWER_BYTES:
                raise httpx.DecodingError(
                    f"the answer has more than {MAX_ANSWER_BYTES} bytes", request=request
                )
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
    """What came of a request, for an error: the failure, or the status and how the text begins.

    Args:
        outcome: Of the request.
        secret: Is left out, wherever it stands; "" for none.
    """
    if isinstance(outcome, httpx.RequestError):
        return hide(f"{type(outcome).__name__}: {outcome}", secret)
    asked = outcome.headers.get("Retry-After")
    patience = "" if asked is None else f", Retry-After {asked}"
    return f"status {outcome.status_code}{patience}: {hide(outcome.text, secret)[:EXCERPT]!r}"


def hide(text: str, secret: str) -> str:
    """The text without a secret; to be called before a text is cut, which could cut the secret."""
    return text.replace(secret, "[key]") if secret else text


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
