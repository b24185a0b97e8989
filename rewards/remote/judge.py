"""Client of a vision-language model: ask about pictures, and read the answers as scores."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.base import has_needs
from rewards.pictures import encode_png
from rewards.remote.client import open_client, read_key, send
from rewards.terms.vlm_judge import Question
from rewards.types import Prompt, RewardError, Scores, describe_error

_STATUSES = frozenset({429, *range(500, 600)})
_LONGEST_QUOTED = 200
"""Characters of an answer quoted in an error."""


@dataclass(frozen=True)
class Endpoint:
    """Address of the model, and how to send requests.

    Attributes:
        url: Base URL of the endpoint; /chat/completions is appended.
        model: Name of the model there.
        api_key_variable: Environment variable with the key; None: send none.
        request_timeout_seconds: Time limit of one request.
        retries: Further attempts after a timeout, a broken connection, or status 429 or 5xx.
        requests_at_once: Largest number of concurrent requests.
    """

    url: str
    model: str
    api_key_variable: str | None = None
    request_timeout_seconds: float = 60.0
    retries: int = 3
    requests_at_once: int = 8


class VlmJudgeReward:
    """The model's answer to a question about each picture, mapped linearly to 0..1.

    Each picture is sent separately, at temperature 0; whether the same picture always gets the same
    score depends on the endpoint. Memory, device and licence are those of the model there.

    Args:
        endpoint: Its list of models is requested once, so that a wrong address is found before
            anything is sampled; an endpoint without such a list is accepted.
        question: See `Question`.

    Raises:
        RewardError: The endpoint cannot be reached or refuses the key, or the variable does not
            contain the key.
    """

    def __init__(self, endpoint: Endpoint, question: Question) -> None:
        self._endpoint = endpoint
        self._question = question
        self._url = endpoint.url.rstrip("/")
        variable = endpoint.api_key_variable
        option = "vlm_judge.api_key_variable"
        remedy = "leave api_key_variable out if the endpoint needs none"
        key = "" if variable is None else read_key(variable, option=option, remedy=remedy)
        self._client = open_client(key=key, seconds=endpoint.request_timeout_seconds)
        self._check_endpoint()

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has the parts that the question mentions."""
        return has_needs(prompt, self._question.needs())

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Ask about every picture, several at a time.

        Raises:
            RewardError: The endpoint failed, or an answer is not a score; the message names prompt
                and image. Remaining pictures are not sent.
        """
        return self.score_with_notes(prompts, pixels).values

    def score_with_notes(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Scores:
        """Like `score`; the notes are the model's answers, without surrounding white space."""
        pool = ThreadPoolExecutor(self._endpoint.requests_at_once)
        try:
            answers = [*pool.map(self._ask, range(len(prompts)), prompts, pixels)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        values, notes = zip(*answers, strict=True)
        return Scores(torch.tensor(values, dtype=torch.float32), notes)

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty, because the model belongs to the endpoint."""
        return ()

    def _ask(
        self, index: int, prompt: Prompt, picture: UInt8[Tensor, "3 H W"]
    ) -> tuple[float, str]:
        """Get the score of a picture, and the answer that contains it."""
        name = f"vlm_judge: prompt {prompt.prompt_id}, image {index}"
        payload = self._payload(prompt, picture)
        request = self._client.build_request("POST", f"{self._url}/chat/completions", json=payload)
        try:
            reply = send(
                self._client,
                request,
                retries=self._endpoint.retries,
                statuses=_STATUSES,
                errors=(httpx.TransportError,),
            )
        except httpx.RequestError as error:
            raise RewardError(self._say_failed(name, describe_error(error))) from error
        if reply.status_code != httpx.codes.OK:
            raise RewardError(self._say_failed(name, _describe_status(reply)))
        try:
            answer = reply.json()["choices"][0]["message"]["content"].strip()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RewardError(
                f"{name}: {self._url} did not answer with a chat completion that has text; set "
                "vlm_judge.url to an OpenAI-compatible endpoint"
            ) from error
        try:
            return self._question.read(answer), answer
        except ValueError as error:
            raise RewardError(
                f"{name}: {self._endpoint.model} answered {answer[:_LONGEST_QUOTED]!r}; "
                f"{error}. Say so in vlm_judge.question, or use a model that follows it"
            ) from error

    def _say_failed(self, name: str, failure: str) -> str:
        return (
            f"{name}: {self._url} failed with {failure}. Time-outs, broken connections, 429 and "
            f"5xx were tried up to {self._endpoint.retries} times more; see the endpoint's own "
            "log, raise vlm_judge.retries, or lower vlm_judge.requests_at_once"
        )

    def _payload(self, prompt: Prompt, picture: UInt8[Tensor, "3 H W"]) -> dict[str, object]:
        content = [_as_content(picture), _as_text(self._question.ask(prompt))]
        if prompt.sources:
            # For an edit, the judge also sees the source, and is told which picture is which.
            sources = map(_as_content, prompt.sources)
            content = [_as_text("Source:"), *sources, _as_text("Result of the edit:"), *content]
        return {
            "model": self._endpoint.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
        }

    def _check_endpoint(self) -> None:
        try:
            reply = self._client.get(f"{self._url}/models")
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise RewardError(
                f"vlm_judge.url {self._url} cannot be reached ({describe_error(error)}); start "
                "the endpoint, or correct the address: it ends in /v1 for vLLM, SGLang and OpenAI"
            ) from error
        # Not every endpoint lists its models.
        if reply.status_code not in (httpx.codes.OK, httpx.codes.NOT_FOUND):
            raise RewardError(
                f"vlm_judge.url {self._url} refused a request for its models with "
                f"{_describe_status(reply)}; correct the address, or set "
                "vlm_judge.api_key_variable to the environment variable that holds the key"
            )


def _describe_status(reply: httpx.Response) -> str:
    # Without the endpoint's message, which may repeat the key.
    return f"status {reply.status_code} {httpx.codes.get_reason_phrase(reply.status_code)}".rstrip()


def _as_content(picture: UInt8[Tensor, "3 H W"]) -> dict[str, object]:
    data = base64.b64encode(encode_png(picture)).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _as_text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}
