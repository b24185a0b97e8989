"""Turn plain values, as YAML has them, into a validated config and back; compare two configs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml
from omegaconf import OmegaConf
from pydantic import ValidationError
from yaml import MappingNode, Node, SequenceNode, YAMLError

from glm_grpo.config.other_trainers import with_counterparts
from glm_grpo.config.renamed import refuse_old_keys, with_new_keys
from glm_grpo.config.root import Config, estimator_problems
from glm_grpo.errors import ConfigError
from rewards.options import changeable_keys
from rewards.problems import NOT_GIVEN, describe_problems, find_problems

_WHOLE_NUMBER = re.compile("[-+]?(0|[1-9][0-9_]*)")
"""Numbers that the command line reads."""


def validate_config(values: object, *, is_stored: bool = False) -> Config:
    """Validate plain values read from YAML.

    Args:
        values: The sections.
        is_stored: Whether these are the values of an existing run, which can still be read if its
            keys had other names, or `estimator_problems` were allowed.
    """
    if isinstance(values, Mapping):
        if is_stored:
            values = with_new_keys(values)
        else:
            refuse_old_keys(values)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        found = find_problems(error, Config)
        problems = [told for problem in found for told in with_counterparts(problem)]
        raise ConfigError(describe_problems(problems)) from error
    problems = [] if is_stored else estimator_problems(config.loss)
    if problems:
        raise ConfigError(describe_problems(problems))
    return config


def check_yaml(content: bytes, place: str) -> None:
    """Refuse numbers that YAML reads otherwise than the command line does, and dotted keys.

    A torn file is left to those who read it.

    Args:
        place: Path of the file, for errors.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place} is not UTF-8 ({error}); save it as UTF-8") from error
    root = None
    with suppress(YAMLError):
        root = yaml.compose(text, Loader=yaml.CSafeLoader)
    if isinstance(root, MappingNode):
        # Hydra's own sections have keys with dots.
        others = [each for each in root.value if each[0].value not in ("defaults", "hydra")]
        _check_node(MappingNode(root.tag, others), (), place)


def _check_node(node: Node, keys: tuple[str, ...], place: str) -> None:
    if isinstance(node, SequenceNode):
        for each in node.value:
            _check_node(each, keys, place)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            name = str(key.value)
            if "." in name:
                line = f"{place}, line {key.start_mark.line + 1}"
                raise ConfigError(
                    f"{line}: {name!r} is no key of a file, where sections are nested; write "
                    f"{_nested(name)}, or on the command line {'.'.join([*keys, name])}=..."
                )
            _check_node(value, (*keys, name), place)
    elif _is_misread(node):
        raise ConfigError(
            f"{place}, line {node.start_mark.line + 1}: {'.'.join(keys)} = {node.value}: YAML "
            f"would read this as {yaml.safe_load(node.value)} (a number after 0 is octal, one with "
            "colons has base 60); write a decimal number, or put a text in quotes"
        )


def _nested(key: str) -> str:
    *sections, name = key.split(".")
    return f"{': {'.join([*sections, name])}: ...{'}' * len(sections)}"


def _is_misread(node: Node) -> bool:
    if node.tag == "tag:yaml.org,2002:int":
        return not _WHOLE_NUMBER.fullmatch(node.value)
    return bool(node.tag == "tag:yaml.org,2002:float" and ":" in node.value)


def to_yaml(config: Config) -> str:
    """Write every key, resolved, in the form of the run folder's `config.yaml`."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def from_yaml(text: str) -> Config:
    """Read a config written by `to_yaml`."""
    check_yaml(text.encode(), "The stored config")
    try:
        # Stored values are resolved; interpolating could read settings of this machine. The C
        # loader takes a tenth of the time, and every refresh of the gallery reads this.
        values = yaml.load(text, Loader=yaml.CSafeLoader)
    except YAMLError as error:
        raise ConfigError(f"The stored config cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("The stored config cannot be read: it must be a YAML mapping of sections")
    return validate_config(values, is_stored=True)


def can_be_extended(config: Config) -> bool:
    """Whether `train.steps` of a run may be raised: nothing in it is planned for the last step."""
    return config.optim.schedule == "constant" and config.sft.final_weight is None


def config_differences(stored: Config, given: Config) -> list[str]:
    """List the keys in which two configs differ, except those that may change on resume.

    Options declared as `MayChange` may. `train.steps` may change only under a constant learning
    rate: a cosine ends at the last step, so another length changes the learning rate of every step.
    The same applies to `sft.final_weight`. The estimator of a KL with weight 0 may change, too.

    Returns:
        Dotted keys in alphabetical order; empty if the run may be resumed.
    """
    may_change = {*changeable_keys(stored), *changeable_keys(given)}
    if can_be_extended(stored) and can_be_extended(given):
        may_change.add("train.steps")
    if stored.loss.kl_coef == given.loss.kl_coef == 0.0:
        may_change.add("loss.kl_estimator")
    before, after = flatten(stored.model_dump()), flatten(given.model_dump())
    return sorted(
        key
        for key in before.keys() | after.keys()
        if key not in may_change and before.get(key, NOT_GIVEN) != after.get(key, NOT_GIVEN)
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys; an absent section has no keys.

    Args:
        values: The sections.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def set_key(values: dict[str, Any], key: str, value: object) -> None:
    """Set a key in nested sections.

    Args:
        values: The sections, as `Config.model_dump` gives them.
        key: Dotted key whose sections exist.
        value: The new value.
    """
    *sections, name = key.split(".")
    for part in sections:
        values = values[part]
    values[name] = value
