"""Say which part of an OCR score each letter of an image earned."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator, Sequence

from rapidfuzz.distance import Levenshtein

from rewards.score_map import ScoreBox
from rewards.terms.reading_orders import TextBox
from rewards.terms.text_matching import BoxMatch, Span, fold_text, plain_form


def place_score(match: BoxMatch, *, is_case_sensitive: bool = False) -> tuple[ScoreBox, ...]:
    """Divide the score of a match among the letters that were read; it is the sum of their values.

    - A letter is right if it belongs to the words of a wanted text and, with the fewest edits, to
      that text. It earns 1 / (number of wanted letters).
    - Letters that such words have in excess lose, in equal parts, what the right letters of the
      words earn above the score of the text: as much as a right letter earns, or less if the words
      are longer than the text.
    - Wrong letters earn 0. Missing ones have no place, and no box.
    - Words that no text took earn 0. With a penalty, they lose in equal parts what it takes from
      the score.

    Returns:
        A box for each letter that was read, as the engine wrote it, white space excepted.
    """
    values = _letter_values(match)
    found: list[ScoreBox] = []
    for _, words in itertools.groupby(range(len(match.words)), lambda word: id(match.boxes[word])):
        of_box = list(words)
        box_values = itertools.chain.from_iterable(values[word] for word in of_box)
        box = match.boxes[of_box[0]]
        found += _letters_of(box, box_values, is_case_sensitive=is_case_sensitive)
    return tuple(found)


def _letter_values(match: BoxMatch) -> list[list[float]]:
    """Value of each letter of each folded word."""
    values = [[0.0] * len(word) for word in match.words]
    wanted = sum(len(span.text) for span in match.spans)
    for span in match.spans:
        of_span = iter(_span_values([match.words[word] for word in span.words], span))
        for word in span.words:
            values[word] = [next(of_span) / wanted for _ in values[word]]
    extra = set(range(len(values))).difference(*(span.words for span in match.spans))
    penalty = sum(span.gain for span in match.spans) / wanted - match.score
    letters = sum(len(values[word]) for word in extra)
    for word in extra:
        values[word] = [0.0 - penalty / letters for _ in values[word]]
    return values


def _span_values(words: Sequence[str], span: Span) -> list[float]:
    """Value of each letter of a span's words, in wanted letters; they add up to the gain."""
    joined = "".join(words)
    values = [0.0] * len(joined)
    surplus: list[int] = []
    for block in Levenshtein.opcodes(joined, span.text):
        letters = range(block.src_start, block.src_end)
        if block.tag == "equal":
            for letter in letters:
                values[letter] = 1.0
        elif block.tag == "delete":
            surplus += letters
    # Without surplus letters, the gain is the number of right ones.
    excess = sum(values) - span.gain
    for letter in surplus:
        values[letter] = -excess / len(surplus)
    return values


def _letters_of(
    box: TextBox, values: Iterator[float], *, is_case_sensitive: bool
) -> Iterator[ScoreBox]:
    """Letters of a box with their parts of the score, from the values of its folded letters."""
    boxes = box.letter_boxes()
    start = 0
    for letter in split_letters(box.text):
        lefts, tops, rights, bottoms = zip(*boxes[start : start + len(letter)], strict=True)
        start += len(letter)
        folded = fold_text(letter, is_case_sensitive=is_case_sensitive)
        if folded:
            value = sum(itertools.islice(values, len(folded)))
            yield ScoreBox(value, min(lefts), min(tops), max(rights), max(bottoms), letter.strip())


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
