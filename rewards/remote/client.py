"""Send HTTP requests for remote terms: authentication and retries."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Collection

import httpx

from rewards.types import RewardError

PASSING_STATUSES = frozenset({429, 502, 503, 504})
"""Response statuses of a server or proxy that temporarily accepts no request."""

CONNECTION_ERRORS = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Failures after which no server works on the request any more."""

_CONNECT_SECONDS = 10.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 120.0
_THIS_MACHINE = ("all://localhost", "all://127.0.0.1", "all://[::1]")
_KEY = re.compile("[!-~]+")


def open_client(*, key: str, seconds: float) -> httpx.Client:
    """Create the HTTP client of a term.

    Args:
        key: Bearer token; "" for none.
        seconds: Longest wait for an answer.
    """
    return httpx.Client(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS)),
        # Servers close idle connections, and connections are idle between two steps.
        limits=httpx.Limits(max_keepalive_connections=0),
        # Proxies from the environment are for other machines only.
        mounts=dict.fromkeys(_THIS_MACHINE),
    )


def send(
    client: httpx.Client,
    request: httpx.Request,
    *,
    retries: int,
    statuses: Collection[int] = PASSING_STATUSES,
    errors: tuple[type[httpx.TransportError], ...] = CONNECTION_ERRORS,
) -> httpx.Response:
    """Send a request until it is answered, after waits of 0.5, 1, 2, ... seconds, or Retry-After.

    Args:
        client: Client from `open_client`.
        request: A request that can be sent more than once.
        retries: Further attempts, >= 0.
        statuses: Response statuses after which to send again.
        errors: Failures after which to send again.

    Raises:
        httpx.RequestError: The last attempt got no response.
    """
    for tries in itertools.count():
        wait = _FIRST_WAIT * 2 ** min(tries, 10)
        try:
            answer = client.send(request)
        except errors:
            if tries == retries:
                raise
        else:
            if tries == retries or answer.status_code not in statuses:
                break
            asked = answer.headers.get("Retry-After", "")
            wait = float(asked) if asked.isdecimal() else wait
        time.sleep(min(wait, _LONGEST_WAIT))
    return answer


def read_key(variable: str, *, option: str, remedy: str) -> str:
    """Read the key from an environment variable.

    Args:
        variable: Name of the variable.
        option: Config option that names the variable, for errors.
        remedy: What users can do instead of exporting it.

    Raises:
        RewardError: It is not set, or does not contain a valid key, which httpx would quote.
    """
    key = os.environ.get(variable, "")
    if not _KEY.fullmatch(key):
        found = (
            "contains a space, a line break or another character that no key has"
            if key
            else "is not set, or empty"
        )
        raise RewardError(
            f"{option}: the environment variable {variable} {found}; export the key in it, or "
            f"{remedy}"
        )
    return key
