"""Score with a vision-language model behind an OpenAI-compatible endpoint as a judge."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator

from rewards.base import Need, Reward, TermConfig
from rewards.options import LONGEST_WAIT, Url, Variable, problem_at
from rewards.types import Prompt, RewardError

_PLACEHOLDERS = ("prompt", "text", "lowest", "highest")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


class VlmJudgeConfig(TermConfig):
    """A vision-language model behind an OpenAI-compatible endpoint gives the score."""

    kind: Literal["vlm_judge"]
    """Class that scores."""
    url: Url = Field(examples=["http://127.0.0.1:8000/v1"])
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
    and {highest} are filled in. Double literal braces."""
    lowest: int = Field(default=0, ge=-(10**6), le=10**6)
    """Lowest score the model may answer; becomes 0."""
    highest: int = Field(default=10, ge=-(10**6), le=10**6)
    """Highest score the model may answer; becomes 1."""
    api_key_variable: Variable | None = None
    """Environment variable with the API key; absent: send none."""
    request_timeout_seconds: float = Field(default=60.0, gt=0.0, le=LONGEST_WAIT)
    """Time limit of one request in seconds, after which it is sent again."""
    retries: int = Field(default=3, ge=0, le=1000)
    """Further attempts after a timeout, a broken connection, or a response with status 429 or
    5xx."""
    requests_at_once: int = Field(default=8, ge=1, le=1024)
    """Largest number of concurrent requests."""

    @model_validator(mode="after")
    def _check_range(self) -> VlmJudgeConfig:
        if self.lowest >= self.highest:
            rule = f"must be below highest = {self.highest}: scores between them become 0 to 1"
            remedy = f"set lowest={self.highest - 1} or less, or a higher highest"
            raise problem_at(("lowest",), self.lowest, rule, remedy)
        return self

    def needs(self) -> tuple[Need, ...]:
        """Parts of a prompt that the question mentions."""
        question = self.question.replace("{{", "")
        return tuple(need for need in ("prompt", "text") if f"{{{need}}}" in question)

    def check(self) -> None:
        """See `TermConfig`; the endpoint is asked when the term is built."""
        Question(self.question, lowest=self.lowest, highest=self.highest)

    def build(self, device: torch.device) -> Reward:
        """See `TermConfig`."""
        del device
        # httpx takes a tenth of a second to import, which other configs should not wait for.
        from rewards.remote.judge import Endpoint, VlmJudgeReward  # noqa: PLC0415

        endpoint = Endpoint(
            url=self.url,
            model=self.model,
            api_key_variable=self.api_key_variable,
            request_timeout_seconds=self.request_timeout_seconds,
            retries=self.retries,
            requests_at_once=self.requests_at_once,
        )
        question = Question(self.question, lowest=self.lowest, highest=self.highest)
        return VlmJudgeReward(endpoint, question)

    def memory_bytes(self) -> int:
        """0: its network is in the memory of another process."""
        return 0


@dataclass(frozen=True)
class Question:
    """Question about a picture, and how to read the answer.

    Attributes:
        template: Text with the placeholders {prompt}, {text} (the prompt's texts, each in quotation
            marks, separated by commas), {lowest} and {highest}; literal braces are doubled.
        lowest: Lowest score that the model may answer; becomes 0.
        highest: Highest score that the model may answer; becomes 1.

    Raises:
        RewardError: The template contains another placeholder or a single brace, or `lowest` is not
            below `highest`.
    """

    template: str
    lowest: int
    highest: int

    def __post_init__(self) -> None:
        if self.lowest >= self.highest:
            raise RewardError(
                f"vlm_judge.lowest {self.lowest} is not below vlm_judge.highest {self.highest}; "
                "scores from lowest to highest become 0 to 1"
            )
        self._placeholders()

    def needs(self) -> tuple[Need, ...]:
        """Parts of a prompt that the question mentions."""
        used = self._placeholders()
        return tuple(need for need in ("prompt", "text") if need in used)

    def ask(self, prompt: Prompt) -> str:
        """Format the question about a picture for this prompt."""
        return self.template.format(
            prompt=prompt.prompt,
            text=", ".join(f'"{text}"' for text in prompt.texts),
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

    def _placeholders(self) -> set[str]:
        try:
            parts = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise RewardError(
                f"vlm_judge.question {self.template!r} cannot be filled in ({error}); double "
                "literal braces: {{ and }}"
            ) from error
        used = set()
        for _, field, format_spec, conversion in parts:
            if field is None:
                continue
            if field not in _PLACEHOLDERS or format_spec or conversion:
                raise RewardError(
                    f"vlm_judge.question has the placeholder {{{field}}}; there are "
                    f"{', '.join(f'{{{each}}}' for each in _PLACEHOLDERS)}, exactly as written "
                    "here; double literal braces: {{ and }}"
                )
            used.add(field)
        return used
