"""Whether an image is right as a whole, which evaluations report beside the score of a term."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Exact:
    """Share of a term's images that are right.

    Attributes:
        name: Name of the share, such as `ocr_exact`.
        meaning: What it is, for people.
        right_by: What says that an image is right: a `score` of 1, or an empty `note`.
    """

    name: str
    meaning: str
    right_by: Literal["score", "note"]

    def value_of(self, score: float, note: str | None) -> float:
        """1 if an image is right, otherwise 0.

        Args:
            score: NaN if the term does not apply, or refused the image.
            note: None if the term has none.

        Returns:
            NaN if it is not known.
        """
        if math.isnan(score) or (self.right_by == "note" and note is None):
            return math.nan
        return float(score == 1 if self.right_by == "score" else note == "")


EXACT = {
    "ocr": Exact("ocr_exact", "Fraction of images whose text is read without a mistake.", "score"),
    "composition": Exact(
        "composition_exact",
        "Fraction of images that show all that was asked for, by the rule of GenEval.",
        "note",
    ),
}
"""By the usual name of the term; a term with another name has no such share."""
