"""Compare the objects that were found in an image with those that its prompt asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress

from glm_grpo.studio.gallery.readings import Mark
from rewards.terms.composition_rows import CompositionError, read_composition


def read_asked(metadata: str | None) -> tuple[str, ...]:
    """Objects that a prompt asks for, in words.

    Args:
        metadata: Of the prompt, as tables have it.

    Returns:
        Empty if it asks for none, or not in the form of GenEval.
    """
    if metadata is not None:
        # Other terms may use the same fields in another form.
        with suppress(CompositionError):
            composition = read_composition(json.loads(metadata))
            return () if composition is None else composition.describe()
    return ()


def mark_objects(found: Sequence[str], asked: Sequence[str], note: str | None) -> tuple[Mark, ...]:
    """Mark which of the objects that were found are those that were asked for.

    Args:
        found: In words, as `read_asked`.
        note: What is wrong with the image; if empty, all objects are right, those in excess, too.

    Returns:
        Objects, and the commas between them.
    """
    return tuple(_marks(found, {*found} if note == "" else {*asked}))


def _marks(found: Sequence[str], right: set[str]) -> Iterator[Mark]:
    for index, each in enumerate(found):
        if index:
            yield ", ", True
        yield each, each in right
