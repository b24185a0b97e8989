"""Score with a vision-language model behind an OpenAI-compatible endpoint as a judge."""

from __future__ import annotations

import re
import string
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Literal, NamedTuple

import torch
from jaxtyping import UInt8
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn
from typing_extensions import override

from rewards.base import Need, Reward, TermConfig, has_needs
from rewards.options import LONGEST_WAIT, MayChange, Url, Variable, problem_at
from rewards.terms.vlm_judge_answers import (
    LARGEST_DIGIT,
    YES_OR_NO,
    Answer,
    Reading,
    read_first_token,
    read_numbers,
    worths_of_numbers,
)
from rewards.terms.vlm_judge_endpoint import ChatEndpoint, Content, show_image
from rewards.terms.vlm_judge_questions import Question, QuestionError, read_questions
from rewards.types import Prompt, RewardError, Scores, describe_error

_PLACEHOLDERS = "{prompt}, {text}, {question}, {lowest}, {highest} and {metadata[column]}"
_COLUMN = re.compile(r"metadata\[([^\]]*)\]")
_TRIES = 4
"""Times a question is asked before the term refuses the image."""


class VlmJudgeConfig(TermConfig):
    """A vision-language model behind an OpenAI-compatible endpoint gives the score."""

    kind: Literal["vlm_judge"]
    """Class that scores."""
    url: MayChange[Url] = Field(examples=["http://127.0.0.1:8000/v1"])
    """Base URL of the endpoint, such as http://127.0.0.1:8000/v1; /chat/completions is appended."""
    model: str = Field(min_length=1, examples=["Qwen/Qwen3-VL-8B-Instruct"])
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
    and {highest} are filled in, {metadata[name]} with a further column of the prompt's row, and
    {question} with each of the row's `questions`. Double literal braces. Where the answer holds no
    score, the question is asked three more times; then the image is left out of its group."""
    questions: str | None = Field(default=None, min_length=1, examples=["vqa_list"])
    """Column of the prompt's row with a list of questions: each is asked in a request of its own,
    as {question}, and the score is their mean. With `read: probability`, an entry may be a pair of
    a question and its right answer."""
    read: Literal["number", "expected_number", "probability"] = "number"
    """What counts in an answer. `number`: the number that it is, or those that `pattern` finds.
    `expected_number`: the mean of the numbers that its first token could have been, by their
    probabilities. `probability`: that of "yes" against "no", or of the right answer that
    `questions` names. The last two need an endpoint that returns log-probabilities."""
    pattern: str | None = Field(default=None, examples=[r"Final Score: (\d+(?:\.\d+)?)"])
    """Regular expression whose groups find the numbers in a longer answer, all of all its matches;
    the score is their mean. Absent: the answer must be one number and nothing else."""
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
        for problem in (self._problem_of_question(), self._problem_of_reading()):
            if problem is not None:
                raise problem
        return self

    def _problem_of_question(self) -> ValidationError | None:
        def problem(rule: str, remedy: str) -> ValidationError:
            return problem_at(("question",), self.question, rule, remedy)

        try:
            self._fill_in(Prompt("", "", metadata=defaultdict(str)), "")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            rule = f"cannot be filled in ({describe_error(error)}): it may contain {_PLACEHOLDERS}"
            return problem(rule, "double literal braces: {{ and }}")
        has_question = "question" in self._fields()
        if has_question and self.questions is None:
            rule = "contains {question}, but `questions` names no column with what to fill in"
            return problem(rule, "set questions to the column of the prompts' rows that lists them")
        if self.questions is not None and not has_question:
            rule = f"must contain {{question}}, which stands for each of {self.questions}"
            return problem(rule, "write question='{question} Answer in one word.', for example")
        if self.read == "probability" and {"lowest", "highest"} & {*self._fields()}:
            rule = "asks for a number, but read=probability reads yes or no"
            remedy = "write question='Does this figure show \"{prompt}\"? Answer yes or no.'"
            return problem(rule, f"{remedy}, or set read=expected_number")
        return None

    def _problem_of_reading(self) -> ValidationError | None:
        if self.read == "expected_number" and not 0 <= self.lowest < self.highest <= LARGEST_DIGIT:
            rule = (
                f"lowest and highest are {self.lowest} and {self.highest}, but only numbers from 0 "
                f"to {LARGEST_DIGIT} are surely one token, and read=expected_number reads the first"
            )
            return problem_at(("read",), self.read, rule, "set lowest=1 highest=5, for example")
        if self.pattern is None:
            return None
        if self.read != "number":
            rule = f"is not used with read={self.read}, which reads the first token of the answer"
            return problem_at(("pattern",), self.pattern, rule, "leave it out, or set read=number")
        try:
            has_group = re.compile(self.pattern).groups > 0
        except re.error as error:
            rule = f"is not a regular expression ({error})"
            return problem_at(("pattern",), self.pattern, rule, r"escape signs, as in \(1-5\)")
        if not has_group:
            rule = "has no group, so it is not known what of a match is the number"
            remedy = r"put brackets around the number, as in Score: (\d+)"
            return problem_at(("pattern",), self.pattern, rule, remedy)
        return None

    def _fields(self) -> tuple[str, ...]:
        return tuple(field or "" for _, field, _, _ in string.Formatter().parse(self.question))

    @override
    def needs(self) -> tuple[Need, ...]:
        """Parts of a prompt that the question mentions; columns of its row count as `prompt`."""
        used = {*self._fields()}
        if self.columns() or self.questions is not None:
            used.add("prompt")
        return tuple(need for need in ("prompt", "text") if need in used)

    def columns(self) -> tuple[str, ...]:
        """Further columns of a prompt's row that the question mentions."""
        return tuple(found[1] for field in self._fields() if (found := _COLUMN.match(field)))

    @override
    def check_metadata(self, rows: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
        for prompt, metadata in rows.items():
            try:
                self.ask(Prompt(prompt, "", metadata=metadata))
            except RewardError as error:
                yield str(error)

    def ask(self, prompt: Prompt) -> tuple[Question, ...]:
        """Format the questions about an image for this prompt.

        Raises:
            RewardError: Its row does not have what `question` or `questions` names.
        """
        asked = self._row_questions(prompt)
        try:
            return tuple(replace(each, text=self._fill_in(prompt, each.text)) for each in asked)
        # Such as a column whose name is a number, which the format takes for an index.
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RewardError(
                f"vlm_judge.question cannot be filled in for prompt {prompt.prompt_id} "
                f"({describe_error(error)}); it may contain {_PLACEHOLDERS}, where the name of a "
                "column is not a number"
            ) from error

    def _row_questions(self, prompt: Prompt) -> tuple[Question, ...]:
        """The questions in a prompt's row; one without a text if it needs none."""
        missing = [name for name in self.columns() if name not in prompt.metadata]
        if missing:
            raise RewardError(
                f"vlm_judge.question names {missing[0]!r}, a column that prompt "
                f"{prompt.prompt_id} does not have; add it to every row of the prompts"
            )
        if self.questions is None:
            return (Question("", YES_OR_NO),)
        is_right_used = self.read == "probability"
        try:
            return read_questions(prompt.metadata, self.questions, may_have_answers=is_right_used)
        except QuestionError as error:
            raise RewardError(f"prompt {prompt.prompt_id}: {error}") from error

    def _fill_in(self, prompt: Prompt, question: str) -> str:
        return self.question.format(
            prompt=prompt.prompt,
            text=", ".join(f'"{text}"' for text in prompt.texts),
            question=question,
            metadata=prompt.metadata,
            lowest=self.lowest,
            highest=self.highest,
        )

    def read_answer(self, answer: Answer, question: Question) -> Reading:
        """Read the score in an answer to one question."""
        lowest, highest = self.lowest, self.highest
        if self.read == "number":
            return read_numbers(answer, lowest=lowest, highest=highest, pattern=self.pattern)
        if self.read == "expected_number":
            return read_first_token(answer, worths_of_numbers(lowest, highest))
        return read_first_token(answer, question.worths)

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
        is_first_token_read = self.read != "number"
        endpoint = ChatEndpoint(client, self.model, is_first_token_read=is_first_token_read)
        return VlmJudgeReward(self, endpoint)

    @override
    def memory_bytes(self) -> int:
        """0: its network is in the memory of another process."""
        return 0


class VlmJudgeReward:
    """The model's answers to questions about each image, mapped to 0..1, in the mean.

    Each question about each image is sent separately, at temperature 0; whether the same image
    always gets the same score depends on the endpoint. If the answer holds no score, it is sent
    again, at temperature 1 with other seeds, and the image is refused if no answer does. Memory,
    device and licence are those of the model there.

    The endpoint's list of models is requested once, so that a wrong address is found before
    anything is sampled.

    Raises:
        RewardError: The endpoint cannot be reached or refuses the key.
    """

    def __init__(self, config: VlmJudgeConfig, endpoint: ChatEndpoint) -> None:
        self._config = config
        self._endpoint = endpoint
        endpoint.check()

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has the parts that the question mentions.

        Raises:
            RewardError: Its row lacks a column, or its questions cannot be asked.
        """
        self._config.ask(prompt)
        return has_needs(prompt, self._config.needs())

    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Ask every question about every image, several at a time; the notes are the answers."""
        asked = [self._config.ask(prompt) for prompt in prompts]
        pool = ThreadPoolExecutor(self._config.requests_at_once)
        try:
            shown = [*pool.map(show_image, pixels, [prompt.sources for prompt in prompts])]
            inquiries = [
                _Inquiry(f"vlm_judge: prompt {prompt.prompt_id}, image {index}", parts, question)
                for index, (prompt, parts, questions) in enumerate(
                    zip(prompts, shown, asked, strict=True)
                )
                for question in questions
            ]
            readings = pool.map(self._ask, inquiries)
            joined = [_join(questions, [*islice(readings, len(questions))]) for questions in asked]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return Scores(tuple(each.score for each in joined), tuple(each.note for each in joined))

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty, because the model belongs to the endpoint."""
        return ()

    def _ask(self, inquiry: _Inquiry) -> Reading:
        """Ask until an answer holds a score; the last reading if none does."""
        name, shown, question = inquiry
        for number in range(_TRIES):
            answer = self._endpoint.ask(name, shown, question.text, number=number)
            reading = self._config.read_answer(answer, question)
            if reading.score is not None:
                break
        return reading


class _Inquiry(NamedTuple):
    """One question about one image, which the name says for errors."""

    name: str
    shown: tuple[Content, ...]
    question: Question


def _join(questions: Sequence[Question], readings: Sequence[Reading]) -> Reading:
    """Mean of the scores of one image; its note has a line for each question, if several."""
    if len(readings) == 1:
        return readings[0]
    lines = [
        f"{each.note} ({question.text})" for question, each in zip(questions, readings, strict=True)
    ]
    broken = [line for line, each in zip(lines, readings, strict=True) if each.score is None]
    if broken:
        return Reading(None, broken[0])
    scores = [each.score for each in readings if each.score is not None]
    return Reading(fmean(scores), "\n".join(lines))
