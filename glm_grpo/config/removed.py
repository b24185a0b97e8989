"""Keys of earlier versions: ignored at the value that changed nothing, else refused."""

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
        "set the term's weight; `glm-grpo probe --share` proposes weights for such shares",
    ),
    r"reward\.terms\.\w+\.at_least": (None, "leave it out, and give the term a weight"),
    r"loss\.preview_weight": (None, "leave it out: all tokens weigh the same"),
}
"""Pattern of a key; its value that changed nothing, which every run stored; what to do instead."""

_VALUES: Mapping[str, str] = {
    "reward.combine=shares": "set reward.combine=weighted_sum, and weights as `glm-grpo probe "
    "--share` proposes them for such shares",
}
"""A value of a key that is still there; what to do instead."""

_RULE = "was removed; a run made with it needs the version of glm-grpo that made it"


def removed_problem(key: str, value: object) -> Problem | None:
    """Refuses a key or a value of earlier versions; None for any other.

    Args:
        key: Dotted.
        value: What was given.
    """
    found = _find(key)
    remedy = _VALUES.get(f"{key}={value}") if found is None else found[1]
    return None if remedy is None else Problem(key, value, _RULE, remedy)


def without_removed(values: Any, prefix: str = "") -> tuple[Any, list[Problem]]:
    """The sections without what only earlier versions read, and those keys that had an effect.

    Args:
        values: As read from YAML, of any form.
        prefix: Dotted key of `values`, with a dot at its end.
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
