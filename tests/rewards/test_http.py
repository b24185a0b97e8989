from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest

from rewards.http import RetryRules, describe, hide, uses_environment


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
        (httpx.Response(400, text="no such model"), "status 400: 'no such model'"),
        (
            httpx.Response(429, text="busy", headers={"Retry-After": "9"}),
            "status 429, Retry-After 9: 'busy'",
        ),
        (httpx.Response(500, text="x" * 300), f"status 500: '{'x' * 200}'"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
    ],
)
def test_describe_says_what_came_of_a_request(
    outcome: httpx.Response | httpx.RequestError, expected: str
) -> None:
    assert describe(outcome) == expected


def test_describe_leaves_a_secret_out_even_where_the_text_is_cut() -> None:
    text = "x" * 197 + "secret"
    assert (
        describe(httpx.Response(401, text=text), secret="secret") == f"status 401: '{'x' * 197}[ke'"
    )
    assert describe(httpx.ConnectError("for secret"), secret="secret") == "ConnectError: for [key]"


def test_hide_leaves_every_place_of_a_secret_out_and_nothing_without_one() -> None:
    assert hide("abab", "a") == "[key]b[key]b"
    assert hide("abab", "") == "abab"
