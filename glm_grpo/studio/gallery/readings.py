"""Compare what an OCR engine read with the wanted texts, letter by letter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from rewards.terms.letters import split_letters
from rewards.terms.text_matching import fold_text, split_page, take_words

Mark = tuple[str, bool]
"""A piece of a reading, and whether its letters are right."""


@dataclass(frozen=True)
class Reading:
    """Comparison of a reading with the texts that should appear.

    Attributes:
        marks: Pieces of text, alternately right and wrong, that together give the reading; white
            space belongs to the piece before it. Empty if nothing was read.
        missing: Letters of wanted texts that stand nowhere in the reading, not even as a wrong
            letter. In capitals if case does not count.
    """

    marks: tuple[Mark, ...]
    missing: str


def read_letters(read: str, wanted: Sequence[str], *, is_case_sensitive: bool = False) -> Reading:
    """Mark which letters of a reading are right and which are wrong.

    A letter is right if a wanted text shares it, with the fewest edits, with the words that
    `match_texts` assigns to that text. Everything else is wrong: other letters, and unmatched
    words. Differences that `match_texts` ignores (compatibility form, white space, case if so) are
    ignored here as well.

    Args:
        read: Text that was read.
        wanted: Texts that should appear.
        is_case_sensitive: Whether case counts.
    """
    is_right, missing = _align(read, wanted, is_case_sensitive=is_case_sensitive)
    return Reading(_marks(read, is_right, is_case_sensitive=is_case_sensitive), missing)


def _align(read: str, wanted: Sequence[str], *, is_case_sensitive: bool) -> tuple[list[bool], str]:
    """Whether a wanted text has each letter of the folded reading, and the missing letters."""
    page = split_page(read, is_case_sensitive=is_case_sensitive)
    texts = [fold_text(text, is_case_sensitive=is_case_sensitive) for text in wanted]
    starts = [0, *itertools.accumulate(map(len, page.words))]
    is_right = [False] * starts[-1]
    missing = ""
    for span in take_words(page, texts):
        joined = "".join(page.words[word] for word in span.words)
        for block in Levenshtein.opcodes(joined, span.text):
            if block.tag == "equal":
                # The words of a span follow each other in a reading.
                for letter in range(block.src_start, block.src_end):
                    is_right[starts[span.words[0]] + letter] = True
            elif block.tag == "insert":
                missing += span.text[block.dest_start : block.dest_end]
    return is_right, missing if is_case_sensitive else missing.upper()


def _marks(read: str, is_right: Sequence[bool], *, is_case_sensitive: bool) -> tuple[Mark, ...]:
    marks: list[Mark] = []
    blank, place = "", 0
    for cluster in split_letters(read):
        letters = len(fold_text(cluster, is_case_sensitive=is_case_sensitive))
        if letters == 0 and not marks:
            blank += cluster
            continue
        judgement = all(is_right[place : place + letters]) if letters else marks[-1][1]
        marks.append((blank + cluster, judgement))
        blank, place = "", place + letters
    if blank:
        marks.append((blank, False))
    return tuple(
        ("".join(piece for piece, _ in pieces), judgement)
        for judgement, pieces in itertools.groupby(marks, key=lambda mark: mark[1])
    )
