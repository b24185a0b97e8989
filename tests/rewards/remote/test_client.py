from __future__ import annotations

import asyncio
import html
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from urllib.parse import quote

import httpx
import pytest

from rewards.remote import client as http_module
from rewards.remote.client import (
    RetryRules,
    ask,
    describe,
    hide,
    open_client,
    uses_environment,
    wait_for,
)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:1/v1", False),
        ("http://localhost", False),
        ("http://[::1]:80", False),
        ("http://scores.example:8700", True),
        ("http://128.0.0.1", True),
    ],
)
def test_uses_environment_for_other_machines_alone(url: str, expected: bool) -> None:
    assert uses_environment(url) is expected


RULES = RetryRules(retries=3, statuses=frozenset({503}), errors=(httpx.NetworkError,))


@pytest.mark.parametrize(
    ("outcome", "waits"),
    [
        (httpx.Response(503), [0.5, 1.0, 2.0, None]),
        (httpx.ConnectError("refused"), [0.5, 1.0, 2.0, None]),
        (httpx.ReadTimeout("late"), [None]),
        (httpx.Response(500), [None]),
        (httpx.Response(200), [None]),
        (httpx.Response(503, headers={"Retry-After": "7"}), [7.0, 7.0, 7.0, None]),
        (httpx.Response(503, headers={"Retry-After": "0"}), [0.0]),
        (httpx.Response(503, headers={"Retry-After": "121"}), [None]),
        (httpx.Response(503, headers={"Retry-After": "soon"}), [0.5, 1.0]),
        (httpx.Response(503, headers={"Retry-After": "nan"}), [0.5, 1.0]),
        (httpx.Response(503, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}), [0.0]),
    ],
)
def test_retry_rules_wait_longer_each_time_or_as_asked(
    outcome: httpx.Response | httpx.RequestError, waits: list[float | None]
) -> None:
    assert [RULES.wait_after(outcome, tries) for tries in range(1, len(waits) + 1)] == waits


def test_retry_rules_read_a_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    wait = RULES.wait_after(httpx.Response(503, headers={"Retry-After": date}), 1)
    assert 57 < wait <= 60


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (httpx.Response(400, text="no such model"), "status 400 Bad Request"),
        (
            httpx.Response(429, text="busy", headers={"Retry-After": "9"}),
            "status 429 Too Many Requests, Retry-After 9",
        ),
        (httpx.Response(429, headers={"Retry-After": "secret"}), "status 429 Too Many Requests"),
        (
            httpx.Response(401, extensions={"reason_phrase": b"no secret"}),
            "status 401 Unauthorized",
        ),
        (httpx.Response(599), "status 599"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
        (httpx.ConnectError("for secret"), "ConnectError: for [key]"),
    ],
)
def test_describe_says_what_came_of_a_request_and_nothing_that_the_other_side_wrote(
    outcome: httpx.Response | httpx.RequestError, expected: str
) -> None:
    assert describe(outcome, secret="secret") == expected


def test_hide_leaves_every_place_of_a_secret_out_and_nothing_without_one() -> None:
    assert hide("abab", "a") == "[key]b[key]b"
    assert hide("abab", "") == "abab"


KEY = 'sk-4f1b/9c&7a"2e<8d'


@pytest.mark.parametrize(
    "form",
    [
        KEY,
        json.dumps(KEY)[1:-1],
        json.dumps(KEY).replace("/", "\\/")[1:-1],
        json.dumps(json.dumps(KEY))[3:-3],
        "".join(f"\\u00{ord(each):02X}" for each in KEY),
        "".join(f"\\x{ord(each):02x}" for each in KEY),
        quote(KEY),
        quote(KEY, safe=""),
        quote(quote(KEY, safe=""), safe="").lower(),
        "".join(f"%{ord(each):02x}" for each in KEY),
        html.escape(KEY),
        html.escape(html.escape(KEY)),
        "".join(f"&#{ord(each)};" for each in KEY),
        "".join(f"&#x{ord(each):X};" for each in KEY),
        KEY.replace("&", "&amp;").replace("/", "&sol;").replace("-", "%2D"),
    ],
)
def test_hide_leaves_a_secret_out_in_whatever_form_it_stands(form: str) -> None:
    assert hide(f"bad key {form}!", KEY) == "bad key [key]!"


@contextmanager
def endpoint(write: Callable[[socket.socket], None]) -> Iterator[str]:
    """Answers each request by a function that writes to the connection; its URL."""
    is_over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(2**16)
            write(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def accept() -> None:
            while not is_over.is_set():
                with suppress(TimeoutError):
                    threading.Thread(target=answer, args=(server.accept()[0],)).start()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()


HEAD = b"HTTP/1.1 200 OK\r\n"


def endless(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n")
    for _ in range(2**12):  # 256 MiB, where it is read
        connection.sendall(b"x" * 2**16)


def dripping(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n")
    for _ in range(100):
        connection.sendall(b"x")
        time.sleep(0.1)


def dripping_header(connection: socket.socket) -> None:
    connection.sendall(HEAD)
    for number in range(100):
        connection.sendall(f"X-{number}: 1\r\n".encode())
        time.sleep(0.1)


BOMB = zlib.compressobj(9, zlib.DEFLATED, 31)
SQUEEZED = BOMB.compress(b" " * 2**26) + BOMB.flush()


def bomb(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"Content-Encoding: gzip\r\n\r\n" + SQUEEZED)


def no_http(connection: socket.socket) -> None:
    connection.sendall(f"HTTP/1.1 no {KEY}\r\n\r\n".encode())


def asked(url: str, seconds: float = 5.0) -> httpx.Response | httpx.RequestError:
    async def send() -> httpx.Response | httpx.RequestError:
        async with open_client(url, key=KEY) as client:
            rules = RetryRules(retries=0, statuses=frozenset(), errors=())
            request = client.build_request("GET", f"{url}/models")
            return await ask(client, request, rules, seconds=seconds)

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (dripping, "ReadTimeout: no answer within 1 seconds"),
        (dripping_header, "ReadTimeout: no answer within 1 seconds"),
        (bomb, "DecodingError: the answer is compressed, which was not asked for"),
        (no_http, "RemoteProtocolError: the answer breaks off, or is no HTTP"),
    ],
)
def test_an_answer_is_bounded_in_time(
    write: Callable[[socket.socket], None], expected: str
) -> None:
    with endpoint(write) as url:
        started = time.monotonic()
        assert describe(asked(url, seconds=1.0)) == expected
        assert time.monotonic() - started < 4


def test_an_answer_is_bounded_in_bytes() -> None:
    # Long enough for 16 MiB on a busy machine: the size ends it, not the time.
    with endpoint(endless) as url:
        outcome = describe(asked(url, seconds=60.0))

    assert outcome == "DecodingError: the answer has more than 16777216 bytes"


def test_an_answer_of_the_largest_size_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "MAX_ANSWER_BYTES", 100)

    def write(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n" + b"x" * 100)

    with endpoint(write) as url:
        outcome = asked(url)
    assert isinstance(outcome, httpx.Response)
    assert outcome.content == b"x" * 100


def test_wait_for_works_inside_an_event_loop_as_in_a_notebook() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 7

    async def cell() -> int:
        return wait_for(answer())

    assert wait_for(answer()) == 7
    assert asyncio.run(cell()) == 7
