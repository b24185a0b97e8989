"""A scorer in another process, on another machine or in another Python environment, over HTTP."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.terms_config import Need
from rewards.types import Prompt, RewardError
from rewards.wire import (
    EXCERPT,
    ScorerInfo,
    WireError,
    decode_failure,
    decode_info,
    decode_scores,
    encode_request,
    has_needs,
)

_FIRST_WAIT = 0.5
_LONGEST_WAIT = 120.0
_CONNECT_SECONDS = 10.0
_INFO_SECONDS = 30.0


class LostScorerError(RewardError):
    """The connection to a scorer broke, or it gave no answer in time."""


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


class RemoteReward:
    """The scores of a scorer that speaks the format of `rewards.wire`, as it returns them.

    Range, device, memory and licence are those of the scorer behind it. Where the environment
    names a proxy it is used, except for this machine's own addresses.

    Args:
        url: Where the scorer listens.
        needs: What of a prompt it looks at, as the user expects; the scorer must say the same.
        retries: Further tries after a broken connection or status 502, 503 or 504.
        timeout_seconds: Longest wait for the scores of one call.

    Raises:
        RewardError: Nothing listens there, what does is no scorer or of another version, or it
            looks at something else of a prompt.
    """

    def __init__(
        self, url: str, *, needs: Sequence[Need], retries: int, timeout_seconds: float
    ) -> None:
        self._url = url.rstrip("/")
        self._needs = frozenset(needs)
        self._timeout_seconds = timeout_seconds
        self._rules = RetryRules(
            retries=retries,
            statuses=frozenset({502, 503, 504}),
            # Not a read time-out: the scorer is at work or hangs, and would be asked twice.
            errors=(httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout),
        )
        self._client = httpx.Client(trust_env=uses_environment(url))
        self._name = self._read_info().name

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the scorer looks at; the scorer is not asked."""
        return has_needs(prompt, self._needs)

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Send the pictures with their prompts in one request; scores come back on the CPU.

        Raises:
            LostScorerError: The connection broke, or there was no answer in time.
            RewardError: The scorer failed, with its own words, or answered something else than one
                finite number per picture.
        """
        body = encode_request(prompts, pixels, has_targets="target" in self._needs)
        answer = self._send("POST", "/score", body, seconds=self._timeout_seconds)
        try:
            return decode_scores(answer, count=len(prompts))
        except WireError as error:
            raise RewardError(
                f"the scorer {self._name} at {self._url} answered what are no scores: {error}. "
                "Correct the scorer; a failure is never counted as a score"
            ) from error

    def modules(self) -> tuple[nn.Module, ...]:
        """None: the networks are the other process's to move."""
        return ()

    def _read_info(self) -> ScorerInfo:
        answer = self._send("GET", "/info", None, seconds=min(_INFO_SECONDS, self._timeout_seconds))
        try:
            info = decode_info(answer)
        except WireError as error:
            raise RewardError(
                f"{self._url}/info is not that of a scorer: {error}. Set the term's url to the "
                "address that `glm-grpo serve-reward` prints"
            ) from error
        if frozenset(info.needs) != self._needs:
            raise RewardError(
                f"the scorer {info.name} at {self._url} looks at {_list(info.needs)}, and the "
                f"config says {_list(self._needs)}; set the term's needs_of_prompt="
                f"[{','.join(info.needs)}]"
            )
        return info

    def _send(self, method: str, path: str, body: bytes | None, *, seconds: float) -> bytes:
        outcome = self._try(method, path, body, seconds=seconds)
        if isinstance(outcome, httpx.ReadTimeout | httpx.WriteTimeout):
            raise LostScorerError(
                f"the scorer at {self._url} gave no answer to {path} within {seconds:g} seconds "
                f"({describe(outcome)}); see whether it still works, or raise the term's "
                "timeout_seconds"
            ) from outcome
        if isinstance(outcome, httpx.RequestError):
            raise LostScorerError(
                f"the scorer at {self._url} cannot be reached ({describe(outcome)}); start it "
                "(`glm-grpo serve-reward`), or set the term's url to where it listens"
            ) from outcome
        if outcome.status_code != httpx.codes.OK:
            raise self._explain_status(outcome)
        return outcome.content

    def _try(
        self, method: str, path: str, body: bytes | None, *, seconds: float
    ) -> httpx.Response | httpx.RequestError:
        timeout = httpx.Timeout(seconds, connect=min(_CONNECT_SECONDS, seconds))
        headers = {} if body is None else {"Content-Type": "application/json"}
        for tries in itertools.count(1):
            outcome: httpx.Response | httpx.RequestError
            try:
                outcome = self._client.request(
                    method, self._url + path, content=body, headers=headers, timeout=timeout
                )
            except httpx.RequestError as error:
                outcome = error
            wait = self._rules.wait_after(outcome, tries)
            if wait is None:
                break
            time.sleep(wait)
        return outcome

    def _explain_status(self, answer: httpx.Response) -> RewardError:
        try:
            failure = decode_failure(answer.content)
        except WireError:
            return RewardError(
                f"{self._url} answered {describe(answer)}; that is no scorer's answer. Set the "
                "term's url to the address that `glm-grpo serve-reward` prints"
            )
        return RewardError(
            f"the scorer at {self._url} failed (status {answer.status_code}): {failure}"
        )


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


def _list(needs: Sequence[Need] | frozenset[Need]) -> str:
    return " and ".join(sorted(needs)) or "the picture alone"
