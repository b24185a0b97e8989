"""Send HTTP requests: authentication, retries and proxies."""

from __future__ import annotations

import itertools
import os
import re
import time

import httpx

from rewards.types import RewardError, describe_error

_PASSING_STATUSES = frozenset({429, 502, 503, 504})
"""Statuses of a server or proxy that temporarily accepts no request."""
_SERVER_ERRORS = frozenset(range(500, 600))

_CONNECTION_ERRORS = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Failures after which no server works on the request any more."""

_CONNECT_SECONDS = 10.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 120.0
_THIS_MACHINE = ("all://localhost", "all://127.0.0.1", "all://[::1]")
_KEY = re.compile("[!-~]+")


class NoAnswerError(Exception):
    """The last attempt got no response; the message says why."""


class HttpClient:
    """Client of one server.

    Args:
        url: Address of the server, to which the paths of requests are appended.
        key: Bearer token; "" for none.
        seconds: Longest wait for a response.
        retries: Further attempts after status 429, 502, 503 or 504 or a broken connection, after
            waits of 0.5, 1, 2, ... seconds, or as long as Retry-After says.
        repeats_failures: Whether to repeat requests also after a timeout and any status from 500.
    """

    def __init__(
        self, url: str, *, key: str, seconds: float, retries: int, repeats_failures: bool = False
    ) -> None:
        self.url = url.rstrip("/")
        self._retries = retries
        self._statuses = _PASSING_STATUSES | (_SERVER_ERRORS if repeats_failures else set())
        self._errors = httpx.TransportError if repeats_failures else _CONNECTION_ERRORS
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS)),
            # Servers close idle connections, and connections are idle between two steps.
            limits=httpx.Limits(max_keepalive_connections=0),
            # Proxies from the environment are for other machines only.
            mounts=dict.fromkeys(_THIS_MACHINE),
        )

    def request(self, path: str, body: bytes | None = None) -> httpx.Response:
        """Post JSON, which may reach the server more than once; without a body, get the path.

        Raises:
            NoAnswerError: There was no response.
        """
        method, headers = "GET" if body is None else "POST", {"Content-Type": "application/json"}
        try:
            return self._send_until_answered(
                self._client.build_request(method, self.url + path, content=body, headers=headers)
            )
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise NoAnswerError(describe_error(error)) from error

    def _send_until_answered(self, request: httpx.Request) -> httpx.Response:
        for tries in itertools.count():
            wait = _FIRST_WAIT * 2 ** min(tries, 10)
            try:
                answer = self._client.send(request)
            except self._errors:
                if tries == self._retries:
                    raise
            else:
                if tries == self._retries or answer.status_code not in self._statuses:
                    break
                asked = answer.headers.get("Retry-After", "")
                wait = float(asked) if asked.isdecimal() else wait
            time.sleep(min(wait, _LONGEST_WAIT))
        return answer


def read_key(variable: str, *, option: str, remedy: str) -> str:
    """Read the key from an environment variable.

    Args:
        option: Config option that names the variable, for errors.
        remedy: What users can do instead of exporting it.
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
