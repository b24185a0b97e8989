"""Question to a vision-language model about a picture, and the reading of its answer."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from rewards.base import Need
from rewards.types import Prompt, RewardError

_PLACEHOLDERS = ("prompt", "text", "lowest", "highest")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


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
