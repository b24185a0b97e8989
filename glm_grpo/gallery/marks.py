"""Which letters of what an OCR engine read are those that the prompt asks for."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence

from rapidfuzz.distance import Levenshtein

from rewards.terms.text_matching import fold_text, split_words, take_words

Mark = tuple[str, bool]
"""A piece of a reading, and whether its letters are right."""


def mark_reading(
    read: str, wanted: Sequence[str], *, is_case_sensitive: bool = False
) -> list[Mark]:
    """Tell the right letters of a reading from the wrong ones.

    Right are the letters that a wanted text shares, by the fewest edits, with the words that
    `match_texts` gives to it; all else is wrong: other letters, and words that no text took. What
    is no difference there (compatibility form, white space, case if so) is none here.

    Args:
        read: What was read.
        wanted: The texts that should appear.
        is_case_sensitive: Whether case is a difference.

    Returns:
        Pieces, right and wrong in turn, that joined give `read`; white space goes with what stands
        before it. Empty where nothing was read.
    """
    is_right = _right_letters(read, wanted, is_case_sensitive=is_case_sensitive)
    marks: list[Mark] = []
    blank, place = "", 0
    for cluster in _clusters(read):
        letters = len(fold_text(cluster, is_case_sensitive=is_case_sensitive))
        if letters == 0 and not marks:
            blank += cluster
            continue
        judgement = all(is_right[place : place + letters]) if letters else marks[-1][1]
        marks.append((blank + cluster, judgement))
        blank, place = "", place + letters
    if blank:
        marks.append((blank, False))
    return [
        ("".join(piece for piece, _ in pieces), judgement)
        for judgement, pieces in itertools.groupby(marks, key=lambda mark: mark[1])
    ]


def _right_letters(read: str, wanted: Sequence[str], *, is_case_sensitive: bool) -> list[bool]:
    """Of each letter of the folded reading, whether a wanted text has it."""
    words = split_words(read, is_case_sensitive=is_case_sensitive)
    texts = [fold_text(text, is_case_sensitive=is_case_sensitive) for text in wanted]
    starts = [0, *itertools.accumulate(map(len, words))]
    is_right = [False] * starts[-1]
    for span in take_words(words, texts):
        joined = "".join(words[span.start : span.stop])
        for block in Levenshtein.opcodes(joined, span.text):
            if block.tag == "equal":
                for letter in range(block.src_start, block.src_end):
                    is_right[starts[span.start] + letter] = True
    return is_right


def _clusters(text: str) -> list[str]:
    """Split where the compatibility form of the whole is that of the parts, joined."""
    clusters: list[str] = []
    for character in text:
        if clusters and _is_joined(clusters[-1], character):
            clusters[-1] += character
        else:
            clusters.append(character)
    return clusters


def _is_joined(before: str, character: str) -> bool:
    """Whether a character, a mark or half a syllable, changes or belongs to those before it."""
    apart = unicodedata.normalize("NFKC", before) + unicodedata.normalize("NFKC", character)
    is_mark = unicodedata.combining(character) != 0
    return is_mark or unicodedata.normalize("NFKC", before + character) != apart
