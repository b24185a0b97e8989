"""Read scores in the answers of a judge: numbers in the text, or probabilities of the first token.

Sources of reading probabilities: VQAScore (2404.01291), Soft-TIFA (GenEval 2, 2512.16853).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

Worths = Mapping[str, float]
"""Scores, 0..1, of the words that count as answers, in lower case."""

YES_OR_NO: Worths = {"yes": 1.0, "no": 0.0}

LARGEST_DIGIT = 9
"""Largest number that one token surely holds: some models write 10 as a 1 and a 0."""

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve"),
)
_LARGEST_COUNT = 100
"""Largest count that is a wrong answer to "how many", rather than none."""
_LEAST_MASS = 0.5
"""Least probability that all words that count must have together."""
_MOST_SHOWN = 3
"""Number of tokens, or of words that count, in a note."""


@dataclass(frozen=True)
class Answer:
    """What an endpoint returned for a question.

    Attributes:
        text: The answer, or why there is none.
        is_refusal: Whether there is none.
        first_tokens: Probabilities of the tokens with which the answer could have begun, highest
            first; empty if they were not asked for.
    """

    text: str
    is_refusal: bool = False
    first_tokens: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Reading:
    """What was read in an answer.

    Attributes:
        score: 0..1; None if the answer holds none.
        note: What people should see of the answer.
    """

    score: float | None
    note: str


def read_numbers(answer: Answer, *, lowest: int, highest: int, pattern: str | None) -> Reading:
    """Read the mean of the numbers in an answer, mapped from lowest..highest to 0..1.

    Args:
        pattern: Regular expression whose groups hold the numbers, all of all its matches; None:
            the answer is one number and nothing else.
    """
    found = [answer.text.strip()] if pattern is None else [*_captures(pattern, answer.text)]
    are_numbers = all(
        _NUMBER.fullmatch(each) and lowest <= float(each) <= highest for each in found
    )
    if answer.is_refusal or not found or not are_numbers:
        return Reading(None, answer.text)
    return Reading((fmean(map(float, found)) - lowest) / (highest - lowest), answer.text)


def _captures(pattern: str, text: str) -> Iterator[str]:
    """Captures of all groups that took part in a match."""
    for match in re.finditer(pattern, text):
        yield from (each.strip() for each in match.groups() if each is not None)


def read_first_token(answer: Answer, worths: Worths) -> Reading:
    """Read the expected worth of the word that an answer begins with.

    sum p(token) worth(token) / sum p(token), over the tokens that are a word that counts, in any
    case and with any spaces around it. Without the divisor it would also be lower for models that
    phrase their answers in other ways; where these have most of the probability, it says nothing.
    """
    if answer.is_refusal:
        return Reading(None, answer.text)
    words = [(token.strip().casefold(), chance) for token, chance in answer.first_tokens]
    counted = [(worths[word], chance) for word, chance in words if word in worths]
    mass = math.fsum(chance for _, chance in counted)
    note = ", ".join(f"{_show(token)} {p:.2f}" for token, p in answer.first_tokens[:_MOST_SHOWN])
    # Written so that NaN, too, is refused.
    if not mass >= _LEAST_MASS:
        shown = ", ".join([*worths][:_MOST_SHOWN]) + (", ..." if len(worths) > _MOST_SHOWN else "")
        return Reading(None, f"{mass:.2f} of the probability is on {shown}: {note or answer.text}")
    return Reading(math.fsum(worth * chance for worth, chance in counted) / mass, note)


def worths_of_numbers(lowest: int, highest: int) -> Worths:
    """Worths of the whole numbers from lowest, which is 0, to highest, which is 1.

    In digits only: a sentence may begin with "One".
    """
    return {
        str(number): (number - lowest) / (highest - lowest) for number in range(lowest, highest + 1)
    }


def worths_of_right_answer(answer: str) -> Worths | None:
    """Worths where one answer is right: `yes`, `no`, or a count from 0 to 9 in digits or words.

    A model that writes one digit per token and answers 12 counts as one that answers 1.

    Returns:
        None for any other right answer, of which the first token may be a part.
    """
    right = answer.strip().casefold()
    if right in YES_OR_NO:
        return {word: float(word == right) for word in YES_OR_NO}
    for count in range(LARGEST_DIGIT + 1):
        if right in _words_for(count):
            return {
                word: float(other == count)
                for other in range(_LARGEST_COUNT + 1)
                for word in _words_for(other)
            }
    return None


def _words_for(count: int) -> tuple[str, ...]:
    none = ("none",) if count == 0 else ()
    return (str(count), *_WORDS[count : count + 1], *none)


def _show(token: str) -> str:
    return token.strip() or repr(token)
