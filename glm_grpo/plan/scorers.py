"""Compute the size of the reward terms' weights from their options."""

from __future__ import annotations

from collections.abc import Iterable

from glm_grpo.models.planning import ScorerSizes
from rewards.base import TermConfig


def scorer_sizes(terms: Iterable[TermConfig]) -> ScorerSizes:
    """Memory of the terms' weights, in fp32."""
    movable = on_cpu = 0
    for term in terms:
        size = term.memory_bytes()
        if term.is_on_cpu:
            on_cpu += size
        else:
            movable += size
    return ScorerSizes(movable=movable, on_cpu=on_cpu)
