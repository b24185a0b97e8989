"""Keys of earlier versions: ignored at the value that had no effect, refused otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rewards.problems import Problem

_KEYS: Mapping[str, tuple[object, str]] = {
    r"reward\.share_rate": (0.3, "leave it out"),
    r"reward\.bound_rate": (0.1, "leave it out"),
    r"reward\.bound_max": (10.0, "leave it out"),
    r"reward\.terms\.\w+\.share": (
        None,
        "set the term's weight; `glm-grpo probe --share` proposes weights for given shares",
    ),
    r"reward\.terms\.\w+\.at_least": (None, "leave it out, and give the term a weight"),
    r"loss\.preview_weight": (None, "leave it out: all tokens weigh the same"),
}
"""Key pattern -> value without effect, which every run stored, and the replacement."""

_VALUES: Mapping[str, str] = {
    "reward.combine=shares": "set reward.combine=weighted_sum, and the weights that `glm-grpo "
    "probe --share` proposes for these shares",
}
"""A removed value of a key that still exists, and the replacement."""

_RULE = "was removed; a run made with it needs the version of glm-grpo that made it"


def removed_problem(key: str, value: object) -> Problem | None:
    """Problem with a key or value of an earlier version; None for any other.

    Args:
        key: Dotted key.
        value: The given value.
    """
    found = _find(key)
    remedy = _VALUES.get(f"{key}={value}") if found is None else found[1]
    return None if remedy is None else Problem(key, value, _RULE, remedy)


def without_removed(values: Any, prefix: str = "") -> tuple[Any, list[Problem]]:
    """Split off removed keys: the remaining sections, and problems for keys that had an effect.

    Args:
        values: As read from YAML, in any form.
        prefix: Dotted key of `values`, ending with a dot.
    """
    if not isinstance(values, Mapping):
        return values, []
    kept, problems = {}, []
    for name, value in values.items():
        key = f"{prefix}{name}"
        problem = removed_problem(key, value)
        if problem is None:
            kept[name], more = without_removed(value, f"{key}.")
            problems += more
        elif (found := _find(key)) is None or value != found[0]:
            problems.append(problem)
    return kept, problems


def _find(key: str) -> tuple[object, str] | None:
    return next((found for pattern, found in _KEYS.items() if re.fullmatch(pattern, key)), None)
