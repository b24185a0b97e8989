"""Say which part of an OCR score each letter of an image earned."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from rewards.score_map import ScoreBox
from rewards.terms.reading_orders import TextBox
from rewards.terms.text_matching import BoxMatch, Span, fold_text, plain_form


def place_score(match: BoxMatch, *, is_case_sensitive: bool = False) -> tuple[ScoreBox, ...]:
    """Divide the score of a match among the letters that were read.

    - A letter is right if it belongs to the words of a wanted text and, with the fewest edits, to
      that text. It earns 1 / (number of wanted letters). One that stands in the place of another
      letter of the text earns 0. Both are compared with what stands for the same letter in other
      images of the group, which is their `kind`.
    - Everything else belongs to the whole image: missing letters, which have no box, and those
      that are in excess or that no text took, which have one of no value.

    Returns:
        A box for each letter that was read, as the engine wrote it, white space excepted.
    """
    letters = _letters_by_word(match)
    found: list[ScoreBox] = []
    for _, words in itertools.groupby(range(len(match.words)), lambda word: id(match.boxes[word])):
        of_box = list(words)
        box_letters = itertools.chain.from_iterable(letters[word] for word in of_box)
        box = match.boxes[of_box[0]]
        found += _letter_boxes(box, box_letters, is_case_sensitive=is_case_sensitive)
    return tuple(found)


@dataclass(frozen=True)
class _Letter:
    """A folded letter that was read: its part of the score, and the letter that it stands for."""

    value: float = 0.0
    kind: str = ""


def _letters_by_word(match: BoxMatch) -> list[list[_Letter]]:
    letters = [[_Letter()] * len(word) for word in match.words]
    wanted = sum(len(span.text) for span in match.spans)
    for span in match.spans:
        of_span = iter(_letters_of(span, "".join(match.words[word] for word in span.words), wanted))
        for word in span.words:
            letters[word] = [next(of_span) for _ in letters[word]]
    return letters


def _letters_of(span: Span, read: str, wanted: int) -> list[_Letter]:
    """Letters of a span's words; `wanted` is the number of letters of all texts."""
    letters = [_Letter()] * len(read)
    for block in Levenshtein.opcodes(read, span.text):
        if block.tag in ("equal", "replace"):
            value = 1 / wanted if block.tag == "equal" else 0.0
            for letter in range(block.src_start, block.src_end):
                place = letter - block.src_start + block.dest_start
                # Of a text that is wanted twice, both copies are alike.
                letters[letter] = _Letter(value, f"{span.text}:{place}")
    return letters


def _letter_boxes(
    box: TextBox, letters: Iterator[_Letter], *, is_case_sensitive: bool
) -> Iterator[ScoreBox]:
    """Letters of a box with their parts of the score, from its folded letters."""
    boxes = box.letter_boxes()
    start = 0
    for letter in split_letters(box.text):
        lefts, tops, rights, bottoms = zip(*boxes[start : start + len(letter)], strict=True)
        start += len(letter)
        folded = fold_text(letter, is_case_sensitive=is_case_sensitive)
        if folded:
            found = list(itertools.islice(letters, len(folded)))
            yield ScoreBox(
                sum(each.value for each in found),
                *(min(lefts), min(tops), max(rights), max(bottoms)),
                text=letter.strip(),
                kind=" ".join(each.kind for each in found if each.kind),
            )


def split_letters(text: str) -> list[str]:
    """Split where the folded parts, joined, give the folded whole: accents stay with letters."""
    letters: list[str] = []
    for character in text:
        if letters and _is_joined(letters[-1], character):
            letters[-1] += character
        else:
            letters.append(character)
    return letters


def _is_joined(before: str, character: str) -> bool:
    """Whether a character, such as an accent, changes or belongs to those before it."""
    # Some marks, such as the half-width voiced one, combine only in their plain form.
    is_mark = any(map(unicodedata.combining, (character, plain_form(character)[:1] or " ")))
    return is_mark or plain_form(before + character) != plain_form(before) + plain_form(character)
