"""The figures that say whether training helped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SummaryRow:
    """One term, or the total, before and after training on the held-out prompts.

    Attributes:
        name: Of the term, or `total`.
        before: Mean of the first evaluation.
        after: Mean of the last evaluation.
        difference: Mean of after - before, paired by prompt.
        low: Lower end of the 95 % interval of the difference.
        high: Upper end of the 95 % interval of the difference.
    """

    name: str
    before: float
    after: float
    difference: float
    low: float
    high: float
