"""Client of one scorer: sends pictures, reads scores, explains failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import httpx
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.base import Need, has_needs
from rewards.remote.client import (
    RetryRules,
    ask,
    describe,
    hide,
    open_client,
    uses_environment,
    wait_for,
)
from rewards.remote.messages import (
    MessageError,
    ScorerInfo,
    decode_failure,
    decode_info,
    decode_scores,
    encode_request,
)
from rewards.secrets import TOKEN_VARIABLE
from rewards.types import Prompt, RewardError, Scores

_INFO_SECONDS = 30.0

_Message = TypeVar("_Message")


class LostScorerError(RewardError):
    """The connection to a scorer broke, or it gave no answer in time."""


class RemoteReward:
    """The scores of a scorer that speaks the format of `rewards.remote.messages`.

    Range, device, memory and licence are those of the scorer behind it. Where the environment
    names a proxy it is used, except for this machine's own addresses.

    Args:
        url: Where the scorer listens.
        needs: What of a prompt it uses, as the user expects; the scorer must say the same.
        retries: Further tries after a broken connection or status 429, 502, 503 or 504.
        timeout_seconds: Longest wait for the scores of one call, further tries included.
        token: Is sent with every request, and repeated in no note or error; "" for none.

    Raises:
        RewardError: Nothing listens there, what does wants another token, is no scorer or of
            another version, or it uses something else of a prompt.
    """

    def __init__(
        self,
        url: str,
        *,
        needs: Sequence[Need],
        retries: int,
        timeout_seconds: float,
        token: str = "",
    ) -> None:
        self._url = url.rstrip("/")
        self._needs = frozenset(needs)
        self._timeout_seconds = timeout_seconds
        self._rules = RetryRules(
            retries=retries,
            statuses=frozenset({429, 502, 503, 504}),
            # Not a read time-out: the scorer is at work or hangs, and would be asked twice.
            errors=(httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout),
        )
        self._token = token
        uses_environment(url)  # refuses what is no address
        # Once: it reads the certificates of all authorities.
        self._certificates = httpx.create_ssl_context()
        self._name = self._read_info().name

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the scorer uses; the scorer is not asked."""
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
        """As `score`; the notes are the scorer's, without the token."""
        body = encode_request(
            prompts,
            pixels,
            has_targets="target" in self._needs,
            has_sources="source" in self._needs,
        )
        answer = self._send("POST", "/score", body, seconds=self._timeout_seconds)
        try:
            scores = self._decode(partial(decode_scores, count=len(prompts)), answer)
        except MessageError as error:
            raise RewardError(
                f"the scorer {self._name} at {self._url} answered what are no scores: {error}. "
                "Correct the scorer; a failure is never counted as a score"
            ) from error
        return Scores(scores.values, tuple(hide(note, self._token) for note in scores.notes))

    def modules(self) -> tuple[nn.Module, ...]:
        """None: the networks are the other process's to move."""
        return ()

    def _read_info(self) -> ScorerInfo:
        answer = self._send("GET", "/info", None, seconds=min(_INFO_SECONDS, self._timeout_seconds))
        try:
            info = self._decode(decode_info, answer)
        except MessageError as error:
            raise RewardError(
                f"{self._url}/info is not that of a scorer: {error}. Set the term's url to the "
                "address that `glm-grpo serve-reward` prints"
            ) from error
        info = info.model_copy(update={"name": hide(info.name, self._token)})
        if frozenset(info.needs) != self._needs:
            raise RewardError(
                f"the scorer {info.name} at {self._url} uses {_list(info.needs)}, and the "
                f"config says {_list(self._needs)}; set the term's needs_of_prompt="
                f"[{','.join(info.needs)}]"
            )
        return info

    def _decode(self, decode: Callable[[bytes], _Message], answer: bytes) -> _Message:
        try:
            return decode(answer)
        except MessageError:
            # It quotes the answer, cut, and the cut could leave a part of the token over.
            hidden = hide(answer.decode(errors="replace"), self._token)
        return decode(hidden.encode())

    def _send(self, method: str, path: str, body: bytes | None, *, seconds: float) -> bytes:
        outcome = wait_for(self._try(method, path, body, seconds=seconds))
        if isinstance(outcome, httpx.ReadTimeout | httpx.WriteTimeout):
            raise LostScorerError(
                f"the scorer at {self._url} gave no answer to {path} within {seconds:g} seconds "
                f"({self._describe(outcome)}); see whether it still works, or raise the term's "
                "timeout_seconds"
            ) from outcome
        if isinstance(outcome, httpx.DecodingError):
            raise RewardError(
                f"{self._url} answered what cannot be read ({self._describe(outcome)}); that is no "
                "scorer's answer. Set the term's url to the address that `glm-grpo serve-reward` "
                "prints"
            ) from outcome
        if isinstance(outcome, httpx.RequestError):
            raise LostScorerError(
                f"the scorer at {self._url} cannot be reached ({self._describe(outcome)}); start "
                "it (`glm-grpo serve-reward`), or set the term's url to where it listens"
            ) from outcome
        if outcome.status_code != httpx.codes.OK:
            raise self._explain_status(outcome)
        return outcome.content

    async def _try(
        self, method: str, path: str, body: bytes | None, *, seconds: float
    ) -> httpx.Response | httpx.RequestError:
        outcome: httpx.Response | httpx.RequestError = httpx.ReadTimeout("it is silent, or slow")
        # Further tries take none of their time from another limit.
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(seconds),
                open_client(self._url, key=self._token, verify=self._certificates) as client,
            ):
                headers = {} if body is None else {"Content-Type": "application/json"}
                url = self._url + path
                request = client.build_request(method, url, content=body, headers=headers)
                outcome = await ask(client, request, self._rules, seconds=seconds)
        return outcome

    def _explain_status(self, answer: httpx.Response) -> RewardError:
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            sent = "the token that was sent is not its own" if self._token else "no token was sent"
            return RewardError(
                f"the scorer at {self._url} asks for a token, and {sent}; export the token that "
                f"the server was started with, or that it printed, in {TOKEN_VARIABLE} or the "
                "variable that the term's token_variable names"
            )
        try:
            failure = hide(decode_failure(answer.content), self._token)
        except MessageError:
            return RewardError(
                f"{self._url} answered {self._describe(answer)}; that is no scorer's answer. Set "
                "the term's url to the address that `glm-grpo serve-reward` prints"
            )
        return RewardError(
            f"the scorer at {self._url} failed (status {answer.status_code}): {failure}"
        )

    def _describe(self, outcome: httpx.Response | httpx.RequestError) -> str:
        # Whatever answers may repeat what it was sent.
        return describe(outcome, secret=self._token)


def _list(needs: Sequence[Need] | frozenset[Need]) -> str:
    return " and ".join(sorted(needs)) or "the picture alone"
