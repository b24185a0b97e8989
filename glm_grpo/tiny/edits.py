"""Edits of the synthetic world: a sign, an instruction, and the sign so changed."""

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
"""What of a sign an edit changes."""

_SHAPE_INSTRUCTIONS = {
    "circle": "make it round",
    "square": "make it square",
    "triangle": "make it a triangle",
}
INSTRUCTION_FORM = (
    'write instead "WORD" | change the colours to COLOURS | '
    f"{' | '.join(_SHAPE_INSTRUCTIONS.values())} | move the word to the top|bottom"
)
"""Of every instruction; words as of `CAPTION_FORM`."""
_INSTRUCTION = re.compile(
    f'write instead "{WORD_PATTERN}"|change the colours to ({"|".join(COLOUR_NAMES)})|'
    f"{'|'.join(_SHAPE_INSTRUCTIONS.values())}|move the word to the (top|bottom)"
)


@dataclass(frozen=True)
class Edit:
    """One edit.

    Attributes:
        kind: One of `KINDS`.
        before: The source picture.
        after: The target picture: as before but for what the kind changes.
    """

    kind: str
    before: Sign
    after: Sign


def instruction(edit: Edit) -> str:
    """What the policy is told; a new word stands in quotation marks, last."""
    if edit.kind == "word":
        return f'write instead "{edit.after.word}"'
    if edit.kind == "colours":
        return f"change the colours to {COLOUR_NAMES[edit.after.colours]}"
    if edit.kind == "shape":
        return _SHAPE_INSTRUCTIONS[edit.after.shape]
    return f"move the word to the {'top' if edit.after.is_word_above else 'bottom'}"


def is_instruction(text: str) -> bool:
    """Whether `instruction` says such a sentence of some edit."""
    return _INSTRUCTION.fullmatch(text) is not None


def edit_of(after: Sign, kind: str, rng: np.random.Generator) -> Edit:
    """An edit that ends with a sign: what it changes was something else before."""
    return Edit(kind, _changed(after, kind, rng), after)


def random_edit(rng: np.random.Generator) -> Edit:
    """An edit of a random kind between signs with no held-out word."""
    return edit_of(random_sign(rng), KINDS[rng.integers(len(KINDS))], rng)


def careless(edit: Edit, rng: np.random.Generator, *, letter_rate: float, rate: float) -> Sign:
    """What a careless hand makes of an edit; what was not to be changed stays.

    Args:
        edit: What was asked for.
        rng: Draws the mistakes.
        letter_rate: Probability that a letter of a new word is random.
        rate: Probability that another change goes wrong.
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
    """A sign with something else in the place of what a kind of edit changes."""
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
