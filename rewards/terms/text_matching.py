"""Share of the wanted texts among the words that were read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

_WORD = re.compile(
    "[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+"
)
"""A kana or Han character, whose scripts put no spaces between words, or a run of others."""

_PLAIN_MARKS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2039\u203a\u02bb\u02bc\u2032\u00b4`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u301d\u301e\u301f", '"'),
        **dict.fromkeys("\u300c\u300d\u300e\u300f\uff62\uff63", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        "\u22ef": "...",
    }
)
"""ASCII for apostrophes (and what is typed in their place), quotation marks, dashes, ellipses."""


@dataclass(frozen=True)
class Span:
    """Neighbouring words that a wanted text takes.

    Attributes:
        text: What is wanted, folded.
        start: The first of the words.
        stop: One past the last; `start` where the text finds none.
        similarity: 0..1, of the words, joined, to the text.
    """

    text: str
    start: int
    stop: int
    similarity: float

    @property
    def gain(self) -> float:
        """Characters of the text that were read, as far as its similarity says."""
        return len(self.text) * self.similarity


def match_texts(
    read: str,
    wanted: Sequence[str],
    *,
    is_case_sensitive: bool = False,
    extra_text_penalty: float = 0.0,
) -> float:
    """Compare each wanted text with the stretch of words that is most like it.

    Every wanted text takes neighbouring words of what was read, no word twice. With s = 1 - edit
    distance / longer length of the two (folded, see `fold_text`), the text that gains most, by
    length * s, takes its words first:

        score = (sum of length * s over wanted texts) / (sum of their lengths)
                * (1 - extra_text_penalty * (share of the read characters that no text took))

    So texts may stand in any order and among other text, a text may run over several words and
    lines, and one that is asked for twice must be there twice. Letters beside a text in the same
    word count as mistakes.

    Args:
        read: Words in reading order, separated by white space.
        wanted: At least one text that is more than white space.
        is_case_sensitive: Whether case is a difference.
        extra_text_penalty: 0..1; 1 takes the whole share of unwanted text from the score.

    Returns:
        0..1, 1 where every text was read without a mistake (and, with a penalty, nothing else).
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
    """The words of a reading, folded; joined, they are the whole reading folded."""
    # In plain form first: only then is a character with its marks one match of the rule.
    found = _WORD.findall(plain_form(read))
    return [fold_text(word, is_case_sensitive=is_case_sensitive) for word in found]


def take_words(words: Sequence[str], texts: Sequence[str]) -> list[Span]:
    """The words that each wanted text takes, see `match_texts`; in the order of taking.

    Args:
        words: As `split_words` gives them.
        texts: What is wanted, folded in the same way.
    """
    is_free = [True] * len(words)
    taken = []
    # Sorted: of texts that gain the same, it must not matter which was asked for first.
    waiting = sorted(texts)
    while waiting:
        spans = [_find_span(text, words, is_free) for text in waiting]
        best = max(spans, key=lambda span: (span.gain, span.similarity))
        waiting.remove(best.text)
        is_free[best.start : best.stop] = [False] * (best.stop - best.start)
        taken.append(best)
    return taken


def fold_text(text: str, *, is_case_sensitive: bool = False) -> str:
    """Remove what does not count as a difference: see `plain_form`; white space, case if so."""
    folded = "".join(plain_form(text).split())
    return folded if is_case_sensitive else folded.casefold()


def plain_form(text: str) -> str:
    """Unicode's compatibility form (NFKC), with apostrophes, quotation marks and dashes of ASCII.

    Engines return full-width letters for Latin ones, and know few typographic marks.
    """
    # Marks first: in compatibility form, an accent is a space with a combining mark.
    return unicodedata.normalize("NFKC", text.translate(_PLAIN_MARKS))


def _find_span(text: str, words: Sequence[str], is_free: Sequence[bool]) -> Span:
    """The most similar words; of several such stretches the one of fewest words, then the first."""
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
            # Longer stretches cannot be more like the text than its share of their length.
            if len(text) <= best.similarity * len(joined):
                break
    return best


def _rank(span: Span) -> tuple[float, int]:
    # Fewest words, because the pieces of a word may be texts that are wanted themselves.
    return span.similarity, span.start - span.stop
