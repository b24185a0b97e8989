"""Images that terms refuse to score: count and name them, and stop where they are too many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import UInt8
from torch import Tensor

from rewards.types import Prompt, RewardError, RewardTable

MOST_REFUSED = 0.25
"""Largest share of its images in a step that a term may refuse; a single one it always may."""
_LONGEST_QUOTED = 200
"""Characters quoted of a note, such as the answer of a judge."""


@dataclass(frozen=True)
class Refusals:
    """What one term refused.

    Attributes:
        images: Number of images of the prompts to which it applies.
        is_weighted: Whether these images have no total.
        first: Prompt, number and note of the first refused image; empty if there is none.
    """

    term: str
    count: int
    images: int
    first: str
    is_weighted: bool

    @property
    def fraction(self) -> float:
        """Share of the images; NaN if the term applies to none."""
        return self.count / self.images if self.images else math.nan

    def describe(self) -> str:
        """Format as the beginning of a sentence."""
        return f"term {self.term} refused {self.count} of {self.images} images: {self.first}"


def find_refusals(prompts: Sequence[Prompt], table: RewardTable) -> tuple[Refusals, ...]:
    """Refusals of each term, in the order of the table."""
    refused = table.is_refused()
    applies, size = table.is_applicable.sum(dim=0).tolist(), table.raw.shape[1]
    found = []
    for column, name in enumerate(table.names):
        images, first = refused[:, :, column].nonzero().tolist(), ""
        if images:
            row, image = images[0]
            notes = table.notes.get(name, [()] * len(prompts))[row]
            note = f", {notes[image][:_LONGEST_QUOTED]!r}" if notes else ""
            first = f"prompt {prompts[row].prompt_id}, image {image}{note}"
        is_weighted = bool(table.weights[column] != 0)
        found.append(Refusals(name, len(images), applies[column] * size, first, is_weighted))
    return tuple(found)


def join_refusals(parts: Sequence[tuple[Refusals, ...]]) -> tuple[Refusals, ...]:
    """Join refusals of the same terms in parts of a step."""
    return tuple(
        Refusals(
            term=each[0].term,
            count=sum(part.count for part in each),
            images=sum(part.images for part in each),
            first=next((part.first for part in each if part.first), ""),
            is_weighted=each[0].is_weighted,
        )
        for each in zip(*parts, strict=True)
    )


def check_refusals(
    refusals: Sequence[Refusals], table: RewardTable, pixels: UInt8[Tensor, "P G 3 H W"]
) -> None:
    """Stop if a term refuses too many images of a step, because it is then what fails.

    Args:
        refusals: Those of the whole step.
        table: Scores of the step, or of a part of it.
        pixels: Images of the table.
    """
    for column, each in enumerate(refusals):
        if each.count > max(1, MOST_REFUSED * each.images):
            raise RewardError(
                f"{each.describe()}. At most {MOST_REFUSED:.0%} of a term's images in a step may "
                "be left out of their groups: correct the scorer (for a judge, its question or "
                f"its model), or remove the term {each.term} from reward.terms",
                images=pixels[table.is_refused()[:, :, column]],
            )
