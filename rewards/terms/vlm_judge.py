"""A vision-language model behind an OpenAI-compatible endpoint as a judge."""

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
    url: Url
    """Base of the endpoint, such as http://127.0.0.1:8000/v1; /chat/completions is added."""
    model: str = Field(min_length=1)
    """Name of the model, as the endpoint knows it."""
    question: str = Field(
        default=(
            "How well does the picture show this: {prompt}\n"
            "Answer with one whole number from {lowest} (not at all) to {highest} (perfectly) and "
            "nothing else."
        ),
        min_length=1,
    )
    """Question about one picture; {prompt}, {text} (the texts that are asked for, in quotation
    marks), {lowest} and {highest} are filled in. Braces that are meant are doubled."""
    lowest: int = Field(default=0, ge=-(10**6), le=10**6)
    """Lowest score the model may answer; becomes 0."""
    highest: int = Field(default=10, ge=-(10**6), le=10**6)
    """Highest score the model may answer; becomes 1."""
    api_key_variable: Variable | None = None
    """Environment variable that holds the key; absent: none is sent."""
    request_timeout_seconds: float = Field(default=60.0, gt=0.0, le=LONGEST_WAIT)
    """Seconds one request may take before it is tried again."""
    retries: int = Field(default=3, ge=0, le=1000)
    """Further tries after a time-out, a broken connection, or an answer of status 429 or 5xx."""
    requests_at_once: int = Field(default=8, ge=1, le=1024)
    """Requests in flight at a time."""

    @model_validator(mode="after")
    def _check_range(self) -> VlmJudgeConfig:
        if self.lowest >= self.highest:
            rule = f"must be below highest = {self.highest}: scores between them become 0 to 1"
            remedy = f"set lowest={self.highest - 1} or less, or a higher highest"
            raise problem_at(("lowest",), self.lowest, rule, remedy)
        return self

    def needs(self) -> tuple[Need, ...]:
        """What the question is about."""
        question = self.question.replace("{{", "")
        return tuple(need for need in ("prompt", "text") if f"{{{need}}}" in question)

    def build(self, device: torch.device) -> Reward:
        """See `TermConfig`."""
        del device
        # httpx takes a tenth of a second, which a config without a judge need not wait for.
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
        """Its network is behind an endpoint, in the memory of another process."""
        return 0


@dataclass(frozen=True)
class Question:
    """What the model is asked about a picture, and how its answer is read.

    Attributes:
        template: With the placeholders {prompt}, {text} (the prompt's texts, each in quotation
            marks, separated by commas), {lowest} and {highest}; a brace that is meant is doubled.
        lowest: Lowest score that the model may answer; becomes 0.
        highest: Highest score that the model may answer; becomes 1.

    Raises:
        RewardError: The template has another placeholder or a single brace, or lowest is not below
            highest.
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
        """What of a prompt the question is about."""
        used = self._placeholders()
        return tuple(need for need in ("prompt", "text") if need in used)

    def ask(self, prompt: Prompt) -> str:
        """The question about a picture for this prompt."""
        return self.template.format(
            prompt=prompt.prompt,
            text=", ".join(f'"{text}"' for text in prompt.texts),
            lowest=self.lowest,
            highest=self.highest,
        )

    def read(self, answer: str) -> float:
        """The score in an answer, mapped to 0..1.

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
                f"vlm_judge.question {self.template!r} cannot be filled in ({error}); double the "
                "braces that are meant: {{ and }}"
            ) from error
        used = set()
        for _, field, format_spec, conversion in parts:
            if field is None:
                continue
            if field not in _PLACEHOLDERS or format_spec or conversion:
                raise RewardError(
                    f"vlm_judge.question has the placeholder {{{field}}}; there are "
                    f"{', '.join(f'{{{each}}}' for each in _PLACEHOLDERS)}, as they stand here, "
                    "and braces that are meant are doubled: {{ and }}"
                )
            used.add(field)
        return used
