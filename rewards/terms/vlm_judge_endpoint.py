"""Ask a model behind an OpenAI-compatible endpoint about images."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import UInt8
from torch import Tensor

from rewards.messages import encode_base64
from rewards.terms.vlm_judge_answers import Answer
from rewards.types import RewardError

if TYPE_CHECKING:
    import httpx

    from rewards.http_client import HttpClient

Content = dict[str, object]
"""A part of a message: a text or an image."""

_REFUSING_STATUSES = frozenset({400, 422})
"""Statuses of an endpoint that works, but does not accept this request: its filter of contents, or
a prompt that is too long."""
_TOP_LOGPROBS = 20
"""Number of first tokens to ask for, the most that OpenAI and, by default, vLLM allow."""


class ChatEndpoint:
    """A model behind an OpenAI-compatible endpoint.

    Args:
        is_first_token_read: Whether answers are one token, with the probabilities of others.
    """

    def __init__(self, client: HttpClient, model: str, *, is_first_token_read: bool) -> None:
        self._client = client
        self._model = model
        self._is_first_token_read = is_first_token_read

    def check(self) -> None:
        """Request the list of models; an endpoint without one is accepted.

        Raises:
            RewardError: The endpoint cannot be reached or refuses the key.
        """
        reply = self._send("vlm_judge", "/models", None)
        if reply.status_code not in (200, 404):
            raise self._failed("vlm_judge", _status(reply))

    def ask(self, name: str, shown: Sequence[Content], question: str, *, number: int) -> Answer:
        """Ask a question about what is shown.

        Args:
            name: What is asked about, for errors.
            number: Counts the requests with this question from 0, which gets the likeliest answer.

        Raises:
            RewardError: The endpoint failed, or did not return what was asked for.
        """
        reply = self._send(name, "/chat/completions", self._payload(shown, question, number))
        if reply.status_code in _REFUSING_STATUSES:
            return Answer(_status(reply), is_refusal=True)
        if reply.status_code != 200:
            raise self._failed(name, _status(reply))
        try:
            choice: dict[str, Any] = reply.json()["choices"][0]
            message = choice["message"]
            # Without content, a model may say why in `refusal`.
            content = (message.get("content") or "").strip()
            refusal = (message.get("refusal") or "").strip()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RewardError(
                f"{name}: {self._client.url} did not answer with a chat completion; set "
                "vlm_judge.url to an OpenAI-compatible endpoint"
            ) from error
        if refusal and not content:
            return Answer(refusal, is_refusal=True)
        return Answer(content, first_tokens=self._first_tokens(name, choice))

    def _first_tokens(self, name: str, choice: dict[str, Any]) -> tuple[tuple[str, float], ...]:
        if not self._is_first_token_read:
            return ()
        try:
            tokens = choice["logprobs"]["content"]
            # An answer without a token is empty, but not an endpoint's fault.
            first = tokens[0]["top_logprobs"] if tokens != [] else []
            # Some endpoints round to numbers above 0.
            found = [(str(each["token"]), math.exp(min(each["logprob"], 0.0))) for each in first]
        except (LookupError, TypeError) as error:
            raise self._without_logprobs(name) from error
        if tokens and not found:
            raise self._without_logprobs(name)
        return tuple(sorted(found, key=lambda each: -each[1]))

    def _without_logprobs(self, name: str) -> RewardError:
        return RewardError(
            f"{name}: {self._client.url} returned no log-probabilities of {self._model}, which "
            "vlm_judge.read=expected_number and read=probability need; use an endpoint and a model "
            "that support `logprobs` and `top_logprobs`, such as vLLM, or set vlm_judge.read=number"
        )

    def _send(self, name: str, path: str, body: bytes | None) -> httpx.Response:
        # httpx takes a tenth of a second to import, which other configs should not wait for.
        from rewards.http_client import NoAnswerError  # noqa: PLC0415

        try:
            return self._client.request(path, body)
        except NoAnswerError as error:
            raise self._failed(name, str(error)) from error

    def _failed(self, name: str, failure: str) -> RewardError:
        return RewardError(
            f"{name}: {self._client.url} failed with {failure}. Start the endpoint or see its log; "
            "correct vlm_judge.url, which ends in /v1 for vLLM, SGLang and OpenAI, or the key that "
            "vlm_judge.api_key_variable names; raise vlm_judge.retries, or lower "
            "vlm_judge.requests_at_once"
        )

    def _payload(self, shown: Sequence[Content], question: str, number: int) -> bytes:
        payload: dict[str, object] = {
            "model": self._model,
            "messages": [{"role": "user", "content": [*shown, _text(question)]}],
            "temperature": 0,
        }
        if self._is_first_token_read:
            payload |= {"max_tokens": 1, "logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        if number > 0:
            # At temperature 0 the answer would be the same, whatever the seed.
            payload |= {"temperature": 1, "seed": number}
        return json.dumps(payload).encode()


def show_image(
    image: UInt8[Tensor, "3 H W"], sources: Sequence[UInt8[Tensor, "3 h w"]]
) -> tuple[Content, ...]:
    """An image as parts of a message; with its sources, which the model is told apart."""
    if not sources:
        return (_image(image),)
    return (_text("Source:"), *map(_image, sources), _text("Result of the edit:"), _image(image))


def _status(reply: httpx.Response) -> str:
    # Without the endpoint's message, which may repeat the key.
    return f"status {reply.status_code} {reply.reason_phrase}".rstrip()


def _image(image: UInt8[Tensor, "3 H W"]) -> Content:
    url = f"data:image/png;base64,{encode_base64(image)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(text: str) -> Content:
    return {"type": "text", "text": text}
