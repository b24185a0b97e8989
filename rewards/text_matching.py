"""How much of the wanted texts is among the words that were read."""

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


@dataclass(frozen=True)
class _Span:
    """Neighbouring words, from `start` up to `stop`, and how like the wanted text they are."""

    start: int
    stop: int
    similarity: float


def match_texts(
    read: str,
    wanted: Sequence[str],
    *,
    is_case_sensitive: bool = False,
    extra_text_penalty: float = 0.0,
) -> float:
    """Compare each wanted text with the stretch of words that is most like it.

    Every wanted text takes neighbouring words of what was read, no word twice, the longest text
    first; with s = 1 - edit distance / longer length of the two (folded, see `fold_text`):

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
    words = [fold_text(word, is_case_sensitive=is_case_sensitive) for word in _WORD.findall(read)]
    is_free = [True] * len(words)
    matched = 0.0
    for text in sorted(texts, key=len, reverse=True):
        span = _find_span(text, words, is_free)
        matched += len(text) * span.similarity
        is_free[span.start : span.stop] = [False] * (span.stop - span.start)
    score = matched / sum(map(len, texts))
    extra = sum(len(word) for word, free in zip(words, is_free, strict=True) if free)
    if extra == 0:
        return score
    return score * (1 - extra_text_penalty * extra / sum(map(len, words)))


def fold_text(text: str, *, is_case_sensitive: bool = False) -> str:
    """Remove what does not count as a difference: compatibility form, white space, case if so.

    Unicode's compatibility form (NFKC) because engines return full-width letters for Latin ones.
    """
    folded = "".join(unicodedata.normalize("NFKC", text).split())
    return folded if is_case_sensitive else folded.casefold()


def _find_span(text: str, words: Sequence[str], is_free: Sequence[bool]) -> _Span:
    best = _Span(0, 0, 0.0)
    for start in range(len(words)):
        joined = ""
        for stop in range(start, len(words)):
            if not is_free[stop]:
                break
            joined += words[stop]
            similarity = Levenshtein.normalized_similarity(joined, text)
            if similarity > best.similarity:
                best = _Span(start, stop + 1, similarity)
            # Longer stretches cannot be more like the text than its share of their length.
            if len(text) <= best.similarity * len(joined):
                break
    return best
