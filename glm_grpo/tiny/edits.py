"""Edits of the synthetic world: a sign, an instruction, and the changed sign."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from glm_grpo.tiny.world import (
    COLOUR_NAMES,
    COLOUR_PAIRS,
    HELD_OUT_WORDS,
    SHAPES,
    WORD_PATTERN,
    Sign,
    random_sign,
)

KINDS = ("word", "colours", "shape", "place")
"""Parts of a sign that an edit can change."""

_SHAPE_INSTRUCTIONS = {
    "circle": "make it round",
    "square": "make it square",
    "triangle": "make it a triangle",
}
INSTRUCTION_FORM = (
    'write instead "WORD" | change the colours to COLOURS | '
    f"{' | '.join(_SHAPE_INSTRUCTIONS.values())} | move the word to the top|bottom"
)
"""Forms of all instructions; words in capitals as in `CAPTION_FORM`."""
_INSTRUCTION = re.compile(
    f'write instead "{WORD_PATTERN}"|change the colours to ({"|".join(COLOUR_NAMES)})|'
    f"{'|'.join(_SHAPE_INSTRUCTIONS.values())}|move the word to the (top|bottom)"
)


@dataclass(frozen=True)
class Edit:
    """One edit.

    Attributes:
        kind: One of `KINDS`.
        before: Source image.
        after: Target image, which differs from `before` only in what the kind changes.
    """

    kind: str
    before: Sign
    after: Sign


def instruction(edit: Edit) -> str:
    """Instruction for the policy; a new word comes last, in quotation marks."""
    if edit.kind == "word":
        return f'write instead "{edit.after.word}"'
    if edit.kind == "colours":
        return f"change the colours to {COLOUR_NAMES[edit.after.colours]}"
    if edit.kind == "shape":
        return _SHAPE_INSTRUCTIONS[edit.after.shape]
    return f"move the word to the {'top' if edit.after.is_word_above else 'bottom'}"


def is_instruction(text: str) -> bool:
    """Whether `instruction` can return this text for some edit."""
    return _INSTRUCTION.fullmatch(text) is not None


def edit_of(after: Sign, kind: str, rng: np.random.Generator) -> Edit:
    """Make an edit that ends with a given sign, whose changed part was different before."""
    return Edit(kind, _changed(after, kind, rng), after)


def random_edit(rng: np.random.Generator) -> Edit:
    """Make an edit of a random kind between signs without held-out words."""
    return edit_of(random_sign(rng), KINDS[rng.integers(len(KINDS))], rng)


def careless(edit: Edit, rng: np.random.Generator, *, letter_rate: float, rate: float) -> Sign:
    """Result of an edit by a careless hand; parts that were not to change stay the same.

    Args:
        edit: Edit to perform.
        rng: Draws the mistakes.
        letter_rate: Probability that a letter of a new word is random.
        rate: Probability that any other change goes wrong.
    """
    if edit.kind != "word":
        return _changed(edit.after, edit.kind, rng) if rng.random() < rate else edit.after
    while True:
        letters = random_sign(rng).word.ljust(4, "X")
        word = "".join(
            letters[place] if rng.random() < letter_rate else letter
            for place, letter in enumerate(edit.after.word)
        )
        if word not in HELD_OUT_WORDS or word == edit.after.word:
            return replace(edit.after, word=word)


def _changed(sign: Sign, kind: str, rng: np.random.Generator) -> Sign:
    """Replace the part of a sign that a kind of edit changes."""
    if kind == "word":
        while (word := random_sign(rng).word) == sign.word:
            pass
        return replace(sign, word=word)
    if kind == "colours":
        step = int(rng.integers(1, len(COLOUR_PAIRS)))
        return replace(sign, colours=(sign.colours + step) % len(COLOUR_PAIRS))
    if kind == "shape":
        step = int(rng.integers(1, len(SHAPES)))
        return replace(sign, shape=SHAPES[(SHAPES.index(sign.shape) + step) % len(SHAPES)])
    return replace(sign, is_word_above=not sign.is_word_above)
