"""Read the questions in a prompt's row, one by one or with their right answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rewards.terms.vlm_judge_answers import LARGEST_DIGIT, YES_OR_NO, Worths, worths_of_right_answer

_EXAMPLE = '["Is there a dog?", "Is the dog black?"]'
_REMEDY_FOR_TABLES = "in a .csv, a column of your own is a text: use a .jsonl"


class QuestionError(ValueError):
    """A row does not have the questions that a judge needs."""


@dataclass(frozen=True)
class Question:
    """A question about an image.

    Attributes:
        worths: Scores of the answers, where their probabilities are read; yes is right if the row
            does not say what is.
    """

    text: str
    worths: Worths


def read_questions(
    metadata: Mapping[str, object], column: str, *, may_have_answers: bool
) -> tuple[Question, ...]:
    """Read a list of questions, each a text or a pair of question and right answer.

    Args:
        may_have_answers: Whether right answers are used.

    Raises:
        QuestionError: There is no such list, it is empty, or an entry is neither.
    """
    listed = metadata.get(column)
    if listed is None:
        raise QuestionError(
            f"there is no column {column!r}, which vlm_judge.questions names; add it to every row, "
            f"such as {_EXAMPLE}, or set prompt_ids to the prompts that have it"
        )
    if not isinstance(listed, list | tuple) or not listed:
        raise QuestionError(
            f"{column} = {listed!r:.100} must be a list of at least one question, such as "
            f"{_EXAMPLE}; {_REMEDY_FOR_TABLES}"
        )
    return tuple(
        _read_question(f"{column}[{index}] = {each!r:.100}", each, may_have_answers)
        for index, each in enumerate(listed)
    )


def _read_question(where: str, entry: object, may_have_answers: bool) -> Question:
    match entry:
        case str(text) if text.strip():
            return Question(text, YES_OR_NO)
        case [str(text), str(answer)] if text.strip():
            if not may_have_answers:
                raise QuestionError(
                    f"{where} gives the right answer, which only vlm_judge.read=probability uses; "
                    "set it, or list the questions alone"
                )
            worths = worths_of_right_answer(answer)
            if worths is None:
                raise QuestionError(
                    f"{where}: the right answer must be yes, no, or a count from 0 to "
                    f"{LARGEST_DIGIT}, because only the first token of an answer is read; "
                    'rephrase the question, such as "Is the dog black?" with "yes"'
                )
            return Question(text, worths)
    raise QuestionError(
        f"{where} must be a question that is not empty, or a question and its right answer, such "
        'as ["How many dogs are there?", "two"]'
    )
