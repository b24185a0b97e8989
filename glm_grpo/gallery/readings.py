"""What an OCR engine read, letter by letter, beside what was asked for."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from rewards.terms.text_matching import fold_text, split_words, take_words

Mark = tuple[str, bool]
"""A piece of a reading, and whether its letters are right."""

Error = tuple[str, str]
"""A letter asked for and the one read in its place; "" where one is missing or too many."""


@dataclass(frozen=True)
class Reading:
    """A reading held against the texts that should appear.

    Attributes:
        marks: Pieces, right and wrong in turn, that joined give what was read; white space goes
            with what stands before it. Empty where nothing was read.
        errors: Of the words that a wanted text took, and of texts that took none; words that no
            text took are no errors of a letter. In capitals where case does not count.
    """

    marks: tuple[Mark, ...]
    errors: tuple[Error, ...]


def read_letters(read: str, wanted: Sequence[str], *, is_case_sensitive: bool = False) -> Reading:
    """Tell the right letters of a reading from the wrong ones.

    Right are the letters that a wanted text shares, by the fewest edits, with the words that
    `match_texts` gives to it; all else is wrong: other letters, and words that no text took. What
    is no difference there (plain form, white space, case if so) is none here.

    Args:
        read: What was read.
        wanted: The texts that should appear.
        is_case_sensitive: Whether case is a difference.
    """
    is_right, errors = _align(read, wanted, is_case_sensitive=is_case_sensitive)
    return Reading(_marks(read, is_right, is_case_sensitive=is_case_sensitive), errors)


def asked_letters(wanted: Sequence[str], *, is_case_sensitive: bool = False) -> str:
    """All letters of the wanted texts, as `Reading.errors` names them."""
    folded = "".join(fold_text(text, is_case_sensitive=is_case_sensitive) for text in wanted)
    return _shown(folded, is_case_sensitive=is_case_sensitive)


def _shown(letters: str, *, is_case_sensitive: bool) -> str:
    # One letter a letter: of some the capital is two.
    return letters if is_case_sensitive else "".join(map(_capital, letters))


def _capital(letter: str) -> str:
    capital = letter.upper()
    return capital if len(capital) == 1 else letter


def _align(
    read: str, wanted: Sequence[str], *, is_case_sensitive: bool
) -> tuple[list[bool], tuple[Error, ...]]:
    """Of each letter of the folded reading whether a wanted text has it, and the errors."""
    words = split_words(read, is_case_sensitive=is_case_sensitive)
    texts = [fold_text(text, is_case_sensitive=is_case_sensitive) for text in wanted]
    starts = [0, *itertools.accumulate(map(len, words))]
    is_right = [False] * starts[-1]
    errors: list[Error] = []
    for span in take_words(words, texts):
        joined = "".join(words[span.start : span.stop])
        for block in Levenshtein.opcodes(joined, span.text):
            if block.tag == "equal":
                for letter in range(block.src_start, block.src_end):
                    is_right[starts[span.start] + letter] = True
                continue
            given = joined[block.src_start : block.src_end]
            asked = span.text[block.dest_start : block.dest_end]
            for pair in itertools.zip_longest(asked, given, fillvalue=""):
                asked_letter, read_letter = (
                    _shown(letter, is_case_sensitive=is_case_sensitive) for letter in pair
                )
                errors.append((asked_letter, read_letter))
    return is_right, tuple(errors)


def _marks(read: str, is_right: Sequence[bool], *, is_case_sensitive: bool) -> tuple[Mark, ...]:
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
    return tuple(
        ("".join(piece for piece, _ in pieces), judgement)
        for judgement, pieces in itertools.groupby(marks, key=lambda mark: mark[1])
    )


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
