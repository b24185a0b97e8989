"""Score with a vision-language model behind an OpenAI-compatible endpoint as a judge."""

from __future__ import annotations

import json
import re
import string
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import UInt8
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from rewards.base import Need, Reward, TermConfig, has_needs
from rewards.messages import encode_base64
from rewards.options import LONGEST_WAIT, MayChange, Url, Variable, problem_at
from rewards.types import Prompt, RewardError, Scores, describe_error

if TYPE_CHECKING:
    import httpx

    from rewards.http_client import HttpClient

_PLACEHOLDERS = "{prompt}, {text}, {lowest}, {highest} and {metadata[column]}"
_COLUMN = re.compile(r"metadata\[([^\]]*)\]")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_TRIES = 4
"""Times an image is shown before the term refuses it."""
_REFUSING_STATUSES = frozenset({400, 422})
"""Statuses of an endpoint that works, but does not accept this request: its filter of contents, or
a prompt that is too long."""


class VlmJudgeConfig(TermConfig):
    """A vision-language model behind an OpenAI-compatible endpoint gives the score."""

    kind: Literal["vlm_judge"]
    """Class that scores."""
    url: MayChange[Url] = Field(examples=["http://127.0.0.1:8000/v1"])
    """Base URL of the endpoint, such as http://127.0.0.1:8000/v1; /chat/completions is appended."""
    model: str = Field(min_length=1, examples=["Qwen/Qwen2.5-VL-7B-Instruct"])
    """Name of the model at the endpoint."""
    question: str = Field(
        default=(
            "How well does the picture show this: {prompt}\n"
            "Answer with one whole number from {lowest} (not at all) to {highest} (perfectly) and "
            "nothing else."
        ),
        min_length=1,
    )
    """Question about one image; {prompt}, {text} (the wanted texts, in quotation marks), {lowest}
    and {highest} are filled in, and {metadata[name]} with a further column of the prompt's row.
    Double literal braces. Where the answer is not one number in this
    range, the question is asked three more times; then the image is left out of its group."""
    lowest: int = Field(default=0, ge=-(10**6), le=10**6)
    """Lowest score the model may answer; becomes 0."""
    highest: int = Field(default=10, ge=-(10**6), le=10**6)
    """Highest score the model may answer; becomes 1."""
    api_key_variable: MayChange[Variable | None] = None
    """Environment variable with the API key; absent: send none."""
    request_timeout_seconds: MayChange[float] = Field(default=60.0, gt=0.0, le=LONGEST_WAIT)
    """Time limit of one request in seconds, after which it is sent again."""
    retries: MayChange[int] = Field(default=3, ge=0, le=1000)
    """Further attempts after a timeout, a broken connection, or a response with status 429 or
    5xx."""
    requests_at_once: MayChange[int] = Field(default=8, ge=1, le=1024)
    """Largest number of concurrent requests."""

    @model_validator(mode="after")
    def _check_relations(self) -> VlmJudgeConfig:
        if self.lowest >= self.highest:
            rule = f"must be below highest = {self.highest}: scores between them become 0 to 1"
            remedy = f"set lowest={self.highest - 1} or less, or a higher highest"
            raise problem_at(("lowest",), self.lowest, rule, remedy)
        try:
            self.ask(Prompt("", "", metadata=defaultdict(str)))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            rule = f"cannot be filled in ({describe_error(error)}): it may contain {_PLACEHOLDERS}"
            remedy = "double literal braces: {{ and }}"
            raise problem_at(("question",), self.question, rule, remedy) from error
        return self

    @override
    def needs(self) -> tuple[Need, ...]:
        """Parts of a prompt that the question mentions."""
        used = {field for _, field, _, _ in string.Formatter().parse(self.question)}
        if self.columns():
            # They say what the image is judged by, as a caption does.
            used.add("prompt")
        return tuple(need for need in ("prompt", "text") if need in used)

    def columns(self) -> tuple[str, ...]:
        """Further columns of a prompt's row that the question mentions."""
        fields = (field or "" for _, field, _, _ in string.Formatter().parse(self.question))
        return tuple(found[1] for field in fields if (found := _COLUMN.match(field)))

    def ask(self, prompt: Prompt) -> str:
        """Format the question about an image for this prompt."""
        return self.question.format(
            prompt=prompt.prompt,
            text=", ".join(f'"{text}"' for text in prompt.texts),
            metadata=prompt.metadata,
            lowest=self.lowest,
            highest=self.highest,
        )

    def read(self, answer: str) -> float:
        """Read the score in an answer, mapped to 0..1.

        Raises:
            ValueError: The answer is not exactly one number from lowest to highest.
        """
        text = answer.strip()
        if not _NUMBER.fullmatch(text) or not self.lowest <= float(text) <= self.highest:
            raise ValueError(
                f"it must be one number from {self.lowest} to {self.highest} and nothing else"
            )
        return (float(text) - self.lowest) / (self.highest - self.lowest)

    @override
    def build(self, device: torch.device) -> Reward:
        del device
        # httpx takes a tenth of a second to import, which other configs should not wait for.
        from rewards.http_client import HttpClient, read_key  # noqa: PLC0415

        key = ""
        if self.api_key_variable is not None:
            remedy = "leave api_key_variable out if the endpoint needs none"
            option = "vlm_judge.api_key_variable"
            key = read_key(self.api_key_variable, option=option, remedy=remedy)
        client = HttpClient(
            self.url,
            key=key,
            seconds=self.request_timeout_seconds,
            retries=self.retries,
            repeats_failures=True,
        )
        return VlmJudgeReward(self, client)

    @override
    def memory_bytes(self) -> int:
        """0: its network is in the memory of another process."""
        return 0


class VlmJudgeReward:
    """The model's answer to a question about each image, mapped linearly to 0..1.

    Each image is sent separately, at temperature 0; whether the same image always gets the same
    score depends on the endpoint. If the answer is not a score, the image is sent again, at
    temperature 1 with other seeds, and refused if no answer is. Memory, device and licence are
    those of the model there.

    The endpoint's list of models is requested once, so that a wrong address is found before
    anything is sampled; an endpoint without such a list is accepted.

    Raises:
        RewardError: The endpoint cannot be reached or refuses the key.
    """

    def __init__(self, config: VlmJudgeConfig, client: HttpClient) -> None:
        self._config = config
        self._client = client
        reply = self._send("vlm_judge", "/models", None)
        if reply.status_code not in (200, 404):
            raise self._failed("vlm_judge", _status(reply))

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has the parts that the question mentions."""
        missing = [name for name in self._config.columns() if name not in prompt.metadata]
        if missing:
            raise RewardError(
                f"vlm_judge.question names {missing[0]!r}, a column that prompt {prompt.prompt_id} "
                "does not have; add it to every row of the prompts"
            )
        try:
            self._config.ask(prompt)
        # Such as a column whose name is a number, which the format takes for an index.
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RewardError(
                f"vlm_judge.question cannot be filled in for prompt {prompt.prompt_id} "
                f"({describe_error(error)}); it may contain {_PLACEHOLDERS}, where the name of a "
                "column is not a number"
            ) from error
        return has_needs(prompt, self._config.needs())

    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Ask about every image, several at a time; the notes are the answers."""
        pool = ThreadPoolExecutor(self._config.requests_at_once)
        try:
            answers = [*pool.map(self._ask, range(len(prompts)), prompts, pixels)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        values, notes = zip(*answers, strict=True)
        return Scores(values, notes)

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty, because the model belongs to the endpoint."""
        return ()

    def _ask(
        self, index: int, prompt: Prompt, image: UInt8[Tensor, "3 H W"]
    ) -> tuple[float | None, str]:
        """Get the score of an image, or None, and the last answer."""
        name = f"vlm_judge: prompt {prompt.prompt_id}, image {index}"
        answer = ""
        for number in range(_TRIES):
            payload = self._payload(prompt, image, number)
            answer = self._answer(name, self._send(name, "/chat/completions", payload))
            with suppress(ValueError):
                return self._config.read(answer), answer
        return None, answer

    def _answer(self, name: str, reply: httpx.Response) -> str:
        """What the model said; or the status, if the endpoint works, but refuses the image."""
        if reply.status_code in _REFUSING_STATUSES:
            return _status(reply)
        if reply.status_code != 200:
            raise self._failed(name, _status(reply))
        try:
            message = reply.json()["choices"][0]["message"]
            # Without content, a model may say why in `refusal`.
            answer: str = (message.get("content") or message.get("refusal") or "").strip()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RewardError(
                f"{name}: {self._client.url} did not answer with a chat completion; set "
                "vlm_judge.url to an OpenAI-compatible endpoint"
            ) from error
        return answer

    def _send(self, name: str, path: str, body: bytes | None) -> httpx.Response:
        from rewards.http_client import NoAnswerError  # noqa: PLC0415 (see above)

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

    def _payload(self, prompt: Prompt, image: UInt8[Tensor, "3 H W"], number: int) -> bytes:
        """Body of a request; `number` counts those about the image, from 0."""
        content = [_as_content(image), _as_text(self._config.ask(prompt))]
        if prompt.sources:
            # For an edit, the judge also sees the source, and is told which image is which.
            sources = map(_as_content, prompt.sources)
            content = [_as_text("Source:"), *sources, _as_text("Result of the edit:"), *content]
        payload = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
        }
        if number > 0:
            # At temperature 0 the answer would be the same, whatever the seed.
            payload |= {"temperature": 1, "seed": number}
        return json.dumps(payload).encode()


def _status(reply: httpx.Response) -> str:
    # Without the endpoint's message, which may repeat the key.
    return f"status {reply.status_code} {reply.reason_phrase}".rstrip()


def _as_content(image: UInt8[Tensor, "3 H W"]) -> dict[str, object]:
    url = f"data:image/png;base64,{encode_base64(image)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _as_text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}
