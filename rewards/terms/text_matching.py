"""Compute the fraction of the wanted texts among the words that were read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

_WORD = re.compile(
    "[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+"
)
"""A kana or Han character (these scripts do not separate words by spaces), or a run of others."""

_PLAIN_MARKS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2039\u203a\u02bb\u02bc\u2032\u00b4`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u301d\u301e\u301f", '"'),
        **dict.fromkeys("\u300c\u300d\u300e\u300f\uff62\uff63", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        "\u22ef": "...",
    }
)
"""ASCII for apostrophes (and characters typed as such), quotation marks, dashes, ellipses."""


@dataclass(frozen=True)
class Span:
    """Neighbouring words assigned to a wanted text.

    Attributes:
        text: Wanted text, folded.
        start: Index of the first word.
        stop: One past the last; equal to `start` if the text matches no words.
        similarity: Similarity of the joined words to the text, 0..1.
    """

    text: str
    start: int
    stop: int
    similarity: float

    @property
    def gain(self) -> float:
        """Number of the text's characters that were read, estimated from the similarity."""
        return len(self.text) * self.similarity


def match_texts(
    read: str,
    wanted: Sequence[str],
    *,
    is_case_sensitive: bool = False,
    extra_text_penalty: float = 0.0,
) -> float:
    """Compare each wanted text with the most similar sequence of words.

    Every wanted text is assigned neighbouring words of the reading, and no word is used twice. With
    s = 1 - edit distance / longer length of the two (folded, see `fold_text`), the text with the
    largest gain, length * s, is assigned its words first:

        score = (sum of length * s over wanted texts) / (sum of their lengths)
                * (1 - extra_text_penalty * (fraction of the read characters that no text took))

    Texts may therefore appear in any order and among other text, a text may span several words and
    lines, and one that is wanted twice must appear twice. Additional letters in the same word count
    as mistakes.

    Args:
        read: Words in reading order, separated by white space.
        wanted: Texts, at least one of which is not only white space.
        is_case_sensitive: Whether case counts.
        extra_text_penalty: 0..1; 1 subtracts the whole fraction of unwanted text from the score.

    Returns:
        0..1; 1 if every text was read without a mistake (and, with a penalty, nothing else).
    """
    texts = [fold_text(text, is_case_sensitive=is_case_sensitive) for text in wanted]
    words = split_words(read, is_case_sensitive=is_case_sensitive)
    spans = take_words(words, texts)
    score = sum(span.gain for span in spans) / sum(map(len, texts))
    letters = sum(map(len, words))
    taken = sum(len(word) for span in spans for word in words[span.start : span.stop])
    if taken == letters:
        return score
    return score * (1 - extra_text_penalty * (letters - taken) / letters)


def split_words(read: str, *, is_case_sensitive: bool) -> list[str]:
    """Split a reading into folded words; joined, they equal the folded reading."""
    # Normalise first: only then does the pattern match a character together with its marks.
    found = _WORD.findall(plain_form(read))
    return [fold_text(word, is_case_sensitive=is_case_sensitive) for word in found]


def take_words(words: Sequence[str], texts: Sequence[str]) -> list[Span]:
    """Words assigned to each wanted text, see `match_texts`; in the order of assignment.

    Args:
        words: Words from `split_words`.
        texts: Wanted texts, folded in the same way.
    """
    is_free = [True] * len(words)
    taken = []
    # Sorted, so that among texts with equal gain, the order of the prompt does not matter.
    waiting = sorted(texts)
    while waiting:
        spans = [_find_span(text, words, is_free) for text in waiting]
        best = max(spans, key=lambda span: (span.gain, span.similarity))
        waiting.remove(best.text)
        is_free[best.start : best.stop] = [False] * (best.stop - best.start)
        taken.append(best)
    return taken


def fold_text(text: str, *, is_case_sensitive: bool = False) -> str:
    """Remove differences that do not count: see `plain_form`; white space, and case if so."""
    folded = "".join(plain_form(text).split())
    return folded if is_case_sensitive else folded.casefold()


def plain_form(text: str) -> str:
    """Unicode's compatibility form (NFKC), with ASCII apostrophes, quotation marks and dashes.

    Engines return full-width letters for Latin ones, and know few typographic marks.
    """
    # Marks first: NFKC turns an accent into a space with a combining mark. And last, because it
    # turns the full-width forms of marks into others.
    normal = unicodedata.normalize("NFKC", text.translate(_PLAIN_MARKS))
    return normal.translate(_PLAIN_MARKS)


def _find_span(text: str, words: Sequence[str], is_free: Sequence[bool]) -> Span:
    """Find the most similar words; among ties the fewest words, then the first."""
    best = Span(text, 0, 0, 0.0)
    for start in range(len(words)):
        joined = ""
        for stop in range(start, len(words)):
            if not is_free[stop]:
                break
            joined += words[stop]
            span = Span(text, start, stop + 1, Levenshtein.normalized_similarity(joined, text))
            if _rank(span) > _rank(best):
                best = span
            # Longer sequences cannot be more similar than the ratio of the lengths.
            if len(text) <= best.similarity * len(joined):
                break
    return best


def _rank(span: Span) -> tuple[float, int]:
    # Fewest words, because the remaining pieces may themselves be wanted texts.
    return span.similarity, span.start - span.stop
