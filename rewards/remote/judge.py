"""Client of a vision-language model: asks about pictures, reads its answers as scores."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import torch
from jaxtyping import Float32, UInt8
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from rewards.base import has_needs
from rewards.pictures import encode_png
from rewards.remote.client import RetryRules, ask, describe, hide, open_client, read_key, wait_for
from rewards.remote.messages import EXCERPT
from rewards.terms.vlm_judge import Question
from rewards.types import Prompt, RewardError, Scores

_PROBE_SECONDS = 10.0
_ONCE = RetryRules(retries=0, statuses=frozenset(), errors=())


@dataclass(frozen=True)
class Endpoint:
    """Where the model is, and how it is asked.

    Attributes:
        url: Base of the endpoint, to which /chat/completions is added.
        model: Its name there.
        api_key_variable: Environment variable that holds the key; None where none is sent.
        request_timeout_seconds: Longest time of one request.
        retries: Further tries after a time-out, a broken connection, or status 429 or 5xx.
        requests_at_once: Most requests in flight.
    """

    url: str
    model: str
    api_key_variable: str | None = None
    request_timeout_seconds: float = 60.0
    retries: int = 3
    requests_at_once: int = 8


@dataclass(frozen=True)
class _Verdict:
    """What the model says of one picture."""

    value: float
    answer: str


class _Message(BaseModel):
    content: str


class _Choice(BaseModel):
    message: _Message


class _Completion(BaseModel):
    """The part of OpenAI's answer that is read; endpoints add to the rest."""

    model_config = ConfigDict(strict=True)
    choices: list[_Choice] = Field(min_length=1)


class VlmJudgeReward:
    """The model's answer to a question about each picture, mapped linearly to 0..1.

    Each picture is asked about alone, at temperature 0; whether the same picture always gets the
    same score is the endpoint's doing. Memory, device and licence are those of the model there.

    Args:
        endpoint: Is asked once for its list of models, so that a wrong address is found before
            anything is sampled; an endpoint that has none will do.
        question: See `Question`.

    Raises:
        RewardError: The endpoint cannot be reached or refuses the key, or the variable that should
            hold the key does not.
    """

    def __init__(self, endpoint: Endpoint, question: Question) -> None:
        self._endpoint = endpoint
        self._question = question
        self._url = endpoint.url.rstrip("/")
        variable = endpoint.api_key_variable
        option = "vlm_judge.api_key_variable"
        remedy = "leave api_key_variable out where none is wanted"
        self._key = "" if variable is None else read_key(variable, option=option, remedy=remedy)
        self._rules = RetryRules(
            retries=endpoint.retries,
            statuses=frozenset({429, *range(500, 600)}),
            errors=(httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError),
        )
        wait_for(self._probe())

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the question is about."""
        return has_needs(prompt, self._question.needs())

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Ask about every picture, several at a time.

        Raises:
            RewardError: The endpoint failed, or an answer is no score; names prompt and image. The
                other requests are given up.
        """
        return self.score_with_notes(prompts, pixels).values

    def score_with_notes(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Scores:
        """As `score`; the notes are the model's answers, without the white space around them."""
        verdicts = wait_for(self._ask_about_all(prompts, pixels))
        values = torch.tensor([verdict.value for verdict in verdicts], dtype=torch.float32)
        return Scores(values, tuple(verdict.answer for verdict in verdicts))

    def modules(self) -> tuple[nn.Module, ...]:
        """None: the model is the endpoint's."""
        return ()

    async def _ask_about_all(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> list[_Verdict]:
        free = asyncio.Semaphore(self._endpoint.requests_at_once)
        async with open_client(self._url, key=self._key) as client:

            async def ask_about(index: int) -> _Verdict:
                async with free:
                    payload = self._payload(prompts[index], pixels[index])
                    url = f"{self._url}/chat/completions"
                    request = client.build_request("POST", url, json=payload)
                    seconds = self._endpoint.request_timeout_seconds
                    outcome = await ask(client, request, self._rules, seconds=seconds)
                name = f"vlm_judge: prompt {prompts[index].prompt_id}, image {index}"
                return self._read_verdict(outcome, name)

            # The first failure ends the wait, which gives up what is still under way.
            return await asyncio.gather(*map(ask_about, range(len(prompts))))

    def _payload(self, prompt: Prompt, picture: UInt8[Tensor, "3 H W"]) -> dict[str, object]:
        content = [_as_content(picture), _as_text(self._question.ask(prompt))]
        if prompt.sources:
            # Of an edit the judge sees what there was before, and which picture is which.
            sources = map(_as_content, prompt.sources)
            content = [_as_text("Source:"), *sources, _as_text("Result of the edit:"), *content]
        return {
            "model": self._endpoint.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
        }

    def _read_verdict(self, outcome: httpx.Response | httpx.RequestError, name: str) -> _Verdict:
        if isinstance(outcome, httpx.RequestError) or outcome.status_code != httpx.codes.OK:
            raise RewardError(
                f"{name}: {self._url} failed with {self._describe(outcome)}. Time-outs, broken "
                f"connections, 429 and 5xx were tried up to {self._endpoint.retries} times more; "
                "see the endpoint's own log, raise vlm_judge.retries, or lower "
                "vlm_judge.requests_at_once"
            )
        try:
            answer = _Completion.model_validate_json(outcome.content).choices[0].message.content
        except ValidationError:
            # Not chained: its text quotes the answer, in which the key may stand.
            raise RewardError(
                f"{name}: {self._url} answered {self._describe(outcome)} with what is no chat "
                "completion with a text; set vlm_judge.url to an OpenAI-compatible endpoint"
            ) from None
        try:
            value = self._question.read(answer)
        except ValueError as error:
            raise RewardError(
                f"{name}: {self._endpoint.model} answered {hide(answer, self._key)[:EXCERPT]!r}; "
                f"{error}. Say so in vlm_judge.question, or use a model that follows it"
            ) from error
        return _Verdict(value, hide(answer.strip(), self._key))

    async def _probe(self) -> None:
        seconds = min(_PROBE_SECONDS, self._endpoint.request_timeout_seconds)
        async with open_client(self._url, key=self._key) as client:
            request = client.build_request("GET", f"{self._url}/models")
            outcome = await ask(client, request, _ONCE, seconds=seconds)
        if isinstance(outcome, httpx.RequestError):
            raise RewardError(
                f"vlm_judge.url {self._url} cannot be reached ({self._describe(outcome)}); start "
                "the endpoint, or correct the address: it ends in /v1 for vLLM, SGLang and OpenAI"
            ) from outcome
        # Not every endpoint lists its models.
        if outcome.status_code not in (httpx.codes.OK, httpx.codes.NOT_FOUND):
            raise RewardError(
                f"vlm_judge.url {self._url} refused a request for its models with "
                f"{self._describe(outcome)}; correct the address, or set "
                "vlm_judge.api_key_variable to the environment variable that holds the key"
            )

    def _describe(self, outcome: httpx.Response | httpx.RequestError) -> str:
        # An endpoint may repeat what it was sent.
        return describe(outcome, secret=self._key)


def _as_content(picture: UInt8[Tensor, "3 H W"]) -> dict[str, object]:
    data = base64.b64encode(encode_png(picture)).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _as_text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}
