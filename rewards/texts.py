"""The texts that a prompt asks for."""

from __future__ import annotations

import re
import unicodedata

_BLANK_LETTERS = frozenset("\u115f\u1160\u2800\u3164\uffa0\U0001d159")
"""Fillers of Hangul, the pattern of Braille without dots, the note without a head."""

QUOTATIONS = (
    re.compile(r"'([^']*)'"),
    re.compile("\u201c([^\u201c\u201d]*)\u201d"),
    re.compile(r'"([^"]*)"'),
    re.compile("\u300c([^\u300c\u300d]*)\u300d"),
)


def find_quoted_texts(prompt: str) -> tuple[str, ...]:
    """The texts a prompt asks for, by the rule that makes GLM-Image's glyph embeddings.

    Everything in '', curly "", straight "" and corner brackets, in this order of the marks; blank
    pieces are left out. A pair of apostrophes quotes what lies between them,
    as it does for the model: a prompt with "a dog's ... a cat's" needs a `text` field of its own.

    Source: diffusers, `GlmImagePipeline.get_glyph_texts`.
    """
    pieces = (piece.strip() for rule in QUOTATIONS for piece in rule.findall(prompt))
    return tuple(piece for piece in pieces if not is_blank(piece))


def has_open_quotation(prompt: str) -> bool:
    """Whether a quotation mark has no partner, so that what it opens is not asked for.

    Straight marks pair up; curly ones and corner brackets open and close. Apostrophes are not
    looked at: most of them quote nothing.
    """
    return prompt.count('"') % 2 == 1 or any(
        prompt.count(opening) != prompt.count(closing)
        for opening, closing in ("\u201c\u201d", "\u300c\u300d")
    )


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen: no letter, number, mark of writing or symbol.

    Spaces, control and format characters (zero-width ones, the byte order mark), variation
    selectors and other marks without a letter, and the letters and symbols that are blank, among
    them all of those that renderers leave out by default.

    Source: Unicode 16, General_Category and Default_Ignorable_Code_Point.
    """
    return not any(
        unicodedata.category(character)[0] in "LNPS" and character not in _BLANK_LETTERS
        for character in text
    )
