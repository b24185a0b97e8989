"""Client of one scorer: send pictures, read scores, explain failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import httpx
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.base import Need, has_needs
from rewards.remote.client import open_client, send
from rewards.remote.messages import (
    MessageError,
    decode_failure,
    decode_info,
    decode_scores,
    encode_request,
)
from rewards.terms.remote import TOKEN_VARIABLE
from rewards.types import Prompt, RewardError, Scores, describe_error


class RemoteReward:
    """Scores of a remote scorer that uses the format of `rewards.remote.messages`.

    Range, device, memory and licence are those of the scorer. Proxies from the environment are
    used, except for this machine's own addresses.

    Args:
        url: Address of the scorer.
        needs: Parts of a prompt that it uses, as the user expects; must equal what the scorer
            states.
        retries: Further attempts after a broken connection or status 429, 502, 503 or 504.
        timeout_seconds: Longest wait for an answer.
        token: Sent with every request; "" for none.

    Raises:
        RewardError: Nothing listens there, or the server wants another token, is not a scorer or of
            another version, or uses other parts of a prompt.
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
        self._retries = retries
        self._client = open_client(key=token, seconds=timeout_seconds)
        self._check_info()

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the scorer uses; does not ask the scorer."""
        return has_needs(prompt, self._needs)

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Send the pictures with their prompts in one request; scores are returned on the CPU.

        Raises:
            RewardError: There was no answer, the scorer failed (the message quotes its error), or
                it returned something other than one finite number per picture.
        """
        return self.score_with_notes(prompts, pixels).values

    def score_with_notes(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Scores:
        """Like `score`; the notes are the scorer's."""
        body = encode_request(
            prompts,
            pixels,
            has_targets="target" in self._needs,
            has_sources="source" in self._needs,
        )
        answer = self._send("POST", "/score", body)
        try:
            return decode_scores(answer, count=len(prompts))
        except MessageError as error:
            raise RewardError(
                f"the scorer at {self._url} did not answer with scores: {error}. Correct the "
                "scorer; a failure is never counted as a score"
            ) from error

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty, because the networks belong to the other process."""
        return ()

    def _check_info(self) -> None:
        answer = self._send("GET", "/info")
        try:
            info = decode_info(answer)
        except MessageError as error:
            raise RewardError(
                f"{self._url}/info does not describe a scorer: {error}. Set the term's url to the "
                "address that `glm-grpo serve-reward` prints"
            ) from error
        if frozenset(info.needs) != self._needs:
            raise RewardError(
                f"the scorer {info.name} at {self._url} uses {_list(info.needs)}, but the config "
                f"says {_list(self._needs)}; set the term's "
                f"needs_of_prompt=[{','.join(info.needs)}]"
            )

    def _send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        try:
            request = self._client.build_request(
                method, self._url + path, content=body, headers=headers
            )
            answer = send(self._client, request, retries=self._retries)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise RewardError(
                f"the scorer at {self._url} gave no answer to {path} ({describe_error(error)}); "
                "start it (`glm-grpo serve-reward`), set the term's url to where it listens, or "
                "raise the term's timeout_seconds if it is only slow"
            ) from error
        if answer.status_code != httpx.codes.OK:
            raise self._explain_status(answer)
        return answer.content

    def _explain_status(self, answer: httpx.Response) -> RewardError:
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            return RewardError(
                f"the scorer at {self._url} requires its token, but got another one or none; "
                "export the token that the server was started with, or that it printed, in "
                f"{TOKEN_VARIABLE} or the variable that the term's token_variable names"
            )
        try:
            failure = decode_failure(answer.content)
        except MessageError:
            failure = (
                f"{answer.reason_phrase}; a scorer does not answer like this. Set the term's url "
                "to the address that `glm-grpo serve-reward` prints"
            )
        return RewardError(
            f"the scorer at {self._url} failed (status {answer.status_code}): {failure}"
        )


def _list(needs: Iterable[Need]) -> str:
    return " and ".join(sorted(needs)) or "only the image"
