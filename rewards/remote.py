"""A scorer in another process, on another machine or in another Python environment, over HTTP."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import httpx
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.base import has_needs
from rewards.http import RetryRules, describe, uses_environment
from rewards.terms_config import Need
from rewards.types import Prompt, RewardError, Scores
from rewards.wire import (
    ScorerInfo,
    WireError,
    decode_failure,
    decode_info,
    decode_scores,
    encode_request,
)

_CONNECT_SECONDS = 10.0
_INFO_SECONDS = 30.0


class LostScorerError(RewardError):
    """The connection to a scorer broke, or it gave no answer in time."""


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
        return self.score_with_notes(prompts, pixels).values

    def score_with_notes(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Scores:
        """As `score`; the notes are the scorer's."""
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


def _list(needs: Sequence[Need] | frozenset[Need]) -> str:
    return " and ".join(sorted(needs)) or "the picture alone"
