"""Keys and metrics that had another name: stored runs are read, and new configs are told."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from glm_grpo.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "advantage.later": "advantage.reward_to_go",
    "anchor.final_weight": "sft.final_weight",
    "anchor.preview": "sft.preview",
    "anchor.weight": "sft.weight",
    "async.max_importance_ratio": "loss.max_importance_ratio",
    "async.min_importance_ratio": "loss.min_importance_ratio",
    "async.on_stale": "loss.importance_weights",
    "loss.ratio_cap": "loss.two_sided_clip",
    "loss.reference_mix": "loss.reference_mixup_alpha",
    "loss.reference_sync_every": "loss.reference_sync_steps",
    "reward.allow_untied": "reward.allow_image_only",
    "rollout.refill_rounds": "rollout.dynamic_sampling_rounds",
    "train.minibatches_per_rollout": "train.minibatches",
    "train.skip_flat": "train.skip_zero_std",
    "train.updates_per_rollout": "train.epochs_per_rollout",
}
"""New name of each key by its old one. Of a term, `only` is `prompt_ids`."""

_CISPO_RATIO = "loss.max_ratio"
_WEIGHTS = {"weigh": "truncate", "drop": "mask"}
"""Values of `loss.importance_weights` by those of `async.on_stale`."""

_TERM_IDS = re.compile(r"(reward\.terms\.[^.]+\.)only")
_METRICS = (
    (re.compile("anchor/(cross_entropy|weight)"), r"sft/\1"),
    (re.compile("(advantage|reward/[^/]+)/flat_fraction"), r"\1/zero_std_fraction"),
)
"""Old names of metrics, and new ones."""


def new_key(key: str, *, is_cispo: bool = False) -> str | None:
    """Name that a key has now; None if it was not renamed.

    Args:
        is_cispo: Whether `loss.kind` is cispo, whose `ratio_cap` had another meaning.
    """
    if is_cispo and key == "loss.ratio_cap":
        return _CISPO_RATIO
    found = _TERM_IDS.fullmatch(key)
    return RENAMED.get(key) if found is None else f"{found[1]}prompt_ids"


def with_new_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a stored run, with the names that its keys have now."""
    renamed = copy.deepcopy(dict(values))
    for section, name, new in _old_keys(values):
        value = _section(renamed, section).pop(name)
        if new == RENAMED["async.on_stale"]:
            value = _WEIGHTS.get(value, value)
        target, _, new_name = new.rpartition(".")
        _section(renamed, target).setdefault(new_name, value)
    if not renamed.get("anchor", True):
        del renamed["anchor"]
    return renamed


def refuse_old_keys(values: Mapping[str, Any]) -> None:
    """Refuse keys by their old names, all at once, so that a config can be brought up to date."""
    old = [f"  {section}.{name} is now {new}" for section, name, new in _old_keys(values)]
    if old:
        raise ConfigError("\n".join(["The config has keys that were renamed:", *old]))


def new_metric(name: str) -> str:
    """Name that a metric of a stored run has now."""
    for old, new in _METRICS:
        if found := old.fullmatch(name):
            return found.expand(new)
    return name


def _old_keys(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Section, old name and new key of each key by its old name."""
    loss = values.get("loss")
    is_cispo = isinstance(loss, Mapping) and loss.get("kind") == "cispo"
    for section, options in _sections(values):
        for name in options:
            new = new_key(f"{section}.{name}", is_cispo=is_cispo)
            if new is not None:
                yield section, str(name), new


def _sections(
    values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{prefix}{name}", value
            yield from _sections(value, f"{prefix}{name}.")


def _section(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.setdefault(part, {}) if isinstance(values, dict) else values[part]
    return values
