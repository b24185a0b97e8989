"""Compute the fraction of the wanted texts among the words that were read."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from rewards.terms.reading_orders import TextBox, reading_orders

_HAN_OR_KANA = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"

_WORD = re.compile(f"(?:[{_HAN_OR_KANA}]|[^\\s{_HAN_OR_KANA}]+)\\s*")
"""A kana or Han character (these scripts do not separate words by spaces), or a run of others; with
the white space behind it."""

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


PARAGRAPH = "\n\n"
"""Separates the words of a reading that no text may join."""


@dataclass(frozen=True)
class Page:
    """Words, and the orders in which they can be read.

    Attributes:
        orders: Indices of words; those beside each other in any of the orders are neighbours.
    """

    words: Sequence[str]
    orders: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Span:
    """Neighbouring words assigned to a wanted text.

    Attributes:
        text: Wanted text, folded.
        words: Indices of the words, as they were read; empty if the text matches none.
        similarity: Similarity of the joined words to the text, 0..1.
    """

    text: str
    words: tuple[int, ...]
    similarity: float

    @property
    def gain(self) -> float:
        """Number of the text's characters that were read, estimated from the similarity."""
        return len(self.text) * self.similarity


@dataclass(frozen=True)
class BoxMatch:
    """Result of `match_boxes`.

    Attributes:
        score: 0..1, see `match_texts`.
        reading: All that was read, for which `match_texts` gives the same score: in rows, or the
            words of each text and the remaining ones in paragraphs.
        spans: Words assigned to each wanted text.
        words: All words that were read, folded; those of a box follow each other.
        boxes: Box of each word.
    """

    score: float
    reading: str
    spans: tuple[Span, ...]
    words: tuple[str, ...]
    boxes: tuple[TextBox, ...]


def match_boxes(
    boxes: Sequence[TextBox],
    wanted: Sequence[str],
    *,
    is_case_sensitive: bool = False,
    extra_text_penalty: float = 0.0,
) -> BoxMatch:
    """Compare each wanted text with the most similar words in any order that people read in.

    Like `match_texts`, with the difference that words are neighbours if they are so in any of
    `reading_orders`. The words of each text are chosen one text after the other, so more orders
    could lower the score: rows alone count if they give as much.
    """
    rows, *others = reading_orders(boxes)
    pieces = [(piece, box) for box in rows for piece in _split_pieces(boxes[box].text)]
    words = [fold_text(piece, is_case_sensitive=is_case_sensitive) for piece, _ in pieces]
    texts = [fold_text(text, is_case_sensitive=is_case_sensitive) for text in wanted]
    orders: list[list[int]] = []
    for order in (rows, *others):
        place = {box: index for index, box in enumerate(order)}
        placed = [word for word, (_, box) in enumerate(pieces) if box in place]
        # Sorting is stable: the words of a box stay together, and in their order.
        orders.append(sorted(placed, key=lambda word: place[pieces[word][1]]))
    spans = take_words(Page(words, orders[:1]), texts)
    score = _score(words, spans, extra_text_penalty)
    reading = " ".join(boxes[box].text for box in rows)
    if others:
        spans_of_all = take_words(Page(words, orders), texts)
        score_of_all = _score(words, spans_of_all, extra_text_penalty)
        if score_of_all > score:
            spans, score = spans_of_all, score_of_all
            reading = _in_paragraphs([piece for piece, _ in pieces], spans)
    boxes_of_words = tuple(boxes[box] for _, box in pieces)
    return BoxMatch(score, reading, tuple(spans), tuple(words), boxes_of_words)


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
        read: Words in reading order, separated by white space; those of different paragraphs,
            which an empty line separates, are not neighbours.
        wanted: Texts, at least one of which is not only white space.
        extra_text_penalty: 0..1; 1 subtracts the whole fraction of unwanted text from the score.

    Returns:
        0..1; 1 if every text was read without a mistake (and, with a penalty, nothing else).
    """
    texts = [fold_text(text, is_case_sensitive=is_case_sensitive) for text in wanted]
    page = split_page(read, is_case_sensitive=is_case_sensitive)
    return _score(page.words, take_words(page, texts), extra_text_penalty)


def split_page(read: str, *, is_case_sensitive: bool) -> Page:
    """Split a reading into folded words, one order a paragraph; joined, they equal the reading."""
    words: list[str] = []
    orders: list[range] = []
    for paragraph in read.split(PARAGRAPH):
        pieces = _split_pieces(paragraph)
        orders.append(range(len(words), len(words) + len(pieces)))
        words += [fold_text(piece, is_case_sensitive=is_case_sensitive) for piece in pieces]
    return Page(words, orders)


def take_words(page: Page, texts: Sequence[str]) -> list[Span]:
    """Words assigned to each wanted text, see `match_texts`; in the order of assignment."""
    is_free = [True] * len(page.words)
    taken = []
    # Sorted, so that among texts with equal gain, the order of the prompt does not matter.
    waiting = sorted(texts)
    while waiting:
        spans = [_find_span(text, page, is_free) for text in waiting]
        best = max(spans, key=lambda span: (span.gain, span.similarity))
        waiting.remove(best.text)
        for word in best.words:
            is_free[word] = False
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


def _split_pieces(read: str) -> list[str]:
    """Split the plain form of a reading into words, each with the white space behind it."""
    # Normalise first: only then does the pattern match a character together with its marks.
    return [match.group() for match in _WORD.finditer(plain_form(read) + " ")]


def _find_span(text: str, page: Page, is_free: Sequence[bool]) -> Span:
    """Find the most similar words; among ties the fewest words, then the first."""
    best = Span(text, (), 0.0)
    for order in page.orders:
        for start in range(len(order)):
            joined = ""
            for stop in range(start, len(order)):
                if not is_free[order[stop]]:
                    break
                joined += page.words[order[stop]]
                similarity = Levenshtein.normalized_similarity(joined, text)
                # Fewest words, because the remaining pieces may themselves be wanted texts.
                if (similarity, start - stop - 1) > (best.similarity, -len(best.words)):
                    best = Span(text, tuple(order[start : stop + 1]), similarity)
                # Longer sequences cannot be more similar than the ratio of the lengths.
                if len(text) <= best.similarity * len(joined):
                    break
    return best


def _score(words: Sequence[str], spans: Sequence[Span], extra_text_penalty: float) -> float:
    score = sum(span.gain for span in spans) / sum(len(span.text) for span in spans)
    letters = sum(map(len, words))
    taken = sum(len(words[word]) for span in spans for word in span.words)
    if taken == letters:
        return score
    return score * (1 - extra_text_penalty * (letters - taken) / letters)


def _in_paragraphs(pieces: Sequence[str], spans: Sequence[Span]) -> str:
    """The words of each text, then those between them; in one order, and no other neighbours."""
    taken = {word for span in spans for word in span.words}
    is_run_taken = itertools.groupby(range(len(pieces)), key=lambda word: word in taken)
    remaining = [tuple(words) for is_taken, words in is_run_taken if not is_taken]
    runs = [*(span.words for span in spans if span.words), *remaining]
    return PARAGRAPH.join("".join(pieces[word] for word in run).strip() for run in runs)
