"""Weights and shares by term, as they are given on a command line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from glm_grpo.errors import ConfigError


def parse_weights(words: Sequence[str], *, option: str) -> dict[str, float]:
    """Read `TERM=NUMBER` words of a command line.

    Args:
        words: As given behind the option.
        option: Such as `--yardstick`, for the error.

    Raises:
        ConfigError: A word is of another form, names a term twice, or is no finite number.
    """
    weights: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not math.isfinite(weight):
            raise ConfigError(
                f"{option} {word!r}: must be the name of a term, = and a finite number, each term "
                f"once; write {option} lpips=0.4 ocr=0.6, say"
            )
        weights[name] = weight
    return weights
