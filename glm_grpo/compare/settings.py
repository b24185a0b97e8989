"""Configs as flat lists of settings, and in what they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence

from glm_grpo.config import Config, flatten
from glm_grpo.config.problems import NOT_GIVEN

_NO_DIFFERENCE = frozenset({"run_dir", "train.resume"})
"""Keys that say where a run lies, not what it is."""


def list_settings(config: Config) -> dict[str, str]:
    """All values of a config as JSON, by dotted key; a section that is absent has none."""
    flat = flatten(config.model_dump(mode="json"))
    return {key: json.dumps(value, ensure_ascii=False) for key, value in flat.items()}


def differing_settings(configs: Sequence[Config]) -> list[dict[str, str]]:
    """For each config the keys, with values as JSON, in which not all of them agree.

    A config without a key of another has "(not given)" there. Where a run lies is no difference.
    """
    flat = [list_settings(config) for config in configs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    differing = [
        key
        for key in keys
        if key not in _NO_DIFFERENCE
        and len({settings.get(key, NOT_GIVEN) for settings in flat}) > 1
    ]
    return [{key: settings.get(key, NOT_GIVEN) for key in differing} for settings in flat]
