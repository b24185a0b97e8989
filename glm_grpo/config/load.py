"""From what Hydra composed, or a run folder stored, to a validated config; and back to YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from glm_grpo.config.problems import (
    NOT_GIVEN,
    Problem,
    describe_problems,
    find_problems,
    known_keys,
    unknown_key_problem,
)
from glm_grpo.config.root import Config
from glm_grpo.errors import ConfigError
from rewards.terms_config import KINDS

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
"""What Hydra raises over a file or an override that it cannot make a config of."""

UNNAMED_COMPOSITION_ERRORS = (ValueError, OSError, RecursionError)
"""What it raises besides, while it composes: over a number for a group's name, a key longer than a
file name, and brackets nested by the hundred."""

_DEEPEST = 50
"""Sections in sections of a stored config; a real one has five."""

_TERMS = "reward.terms."
"""Keys below it need not stand in a file: terms have names of the user's own."""

_MAY_CHANGE_ON_RESUME = frozenset(
    {
        # Where things go and what is kept.
        "run_dir",
        "trackers",
        "train.resume",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        # Where and in which portions the work is done: what one changes when memory runs out.
        "offload",
        "reward.overlap",
        "decode.batch_size",
        "model.gradient_checkpointing",
        "train.micro_batch_size",
        # Where experience is collected; how old it may be makes another run.
        "async.collectors",
        "async.address",
        "async.cpus_per_collector",
        "async.gpus_per_collector",
        # What is said about a run, not what it does.
        "reward.on_hacking",
        "reward.canary_margin",
    }
)


def _sweep_folder_or(run_dir: str) -> str:
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        return str(HydraConfig.get().runtime.output_dir)
    return run_dir


# `${sweep_folder_or:FOLDER}` in a YAML file: FOLDER, but in a sweep the folder that Hydra made for
# this run of it. Hydra has no key that means both.
OmegaConf.register_new_resolver("sweep_folder_or", _sweep_folder_or, replace=True)


def load_config(composed: DictConfig) -> Config:
    """Resolve and validate what Hydra composed.

    Args:
        composed: The task's config, interpolations not yet resolved.

    Returns:
        A config in which every key is known, typed and in range.

    Raises:
        ConfigError: Names every refused key with its value, the rule and the remedy.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"The config cannot be resolved: {error}") from error
    except RecursionError as error:
        raise ConfigError(
            "The config cannot be resolved: a value is nested too deeply; take out brackets"
        ) from error
    if missing:
        problems = [
            Problem(key, NOT_GIVEN, "is needed, and has no usual value", f"write {key}=...")
            for key in missing
        ]
        raise ConfigError(describe_problems(problems))
    return validate_config(values)


def validate_config(values: object) -> Config:
    """Validate plain values, as read from YAML.

    Raises:
        ConfigError: Names every refused key with its value, the rule and the remedy.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe_problems(find_problems(error, Config, values))) from error


def compose_config(config_dir: Path, name: str, overrides: Sequence[str] = ()) -> Config:
    """Compose a file of `config_dir` as `train.py --config-name NAME key=value ...` does.

    Args:
        config_dir: Folder that holds the primary configs and their groups.
        name: Primary config, without `.yaml`.
        overrides: As written on the command line.

    Raises:
        ConfigError: The name or an override is unknown, or a value is refused.
    """
    try:
        with initialize_config_dir(str(config_dir.resolve()), version_base=None):
            composed = compose(name, overrides=list(overrides))
    except (*COMPOSITION_ERRORS, *UNNAMED_COMPOSITION_ERRORS) as error:
        raise override_error(error) from error
    return load_config(composed)


def override_error(error: Exception) -> ConfigError:
    """Say what Hydra refused: for an unknown key with the one that was probably meant.

    Args:
        error: One of `COMPOSITION_ERRORS` or `UNNAMED_COMPOSITION_ERRORS`.
    """
    unknown = re.search(r"use \+([^=\s]+)=(.*)", str(error))
    if unknown is not None:
        return ConfigError(describe_problems([_absent_key_problem(unknown[1], unknown[2])]))
    message = str(error).partition("Config search path:")[0].strip()
    if not isinstance(error, COMPOSITION_ERRORS):
        message = _describe_unnamed(error)
    elif isinstance(error, OverrideParseException):
        message = f"{error.override!r} is not of the form key=value: {message}"
    elif isinstance(error, MissingConfigException) and error.options is None:
        message += " Give the name of a .yaml file in that folder, such as tiny."
    elif isinstance(error.__cause__, OmegaConfBaseException):
        message += f"\n{error.__cause__}"
    return ConfigError(f"The config cannot be composed: {message}")


def _describe_unnamed(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "a value is nested too deeply; take out brackets"
    if isinstance(error, OSError):
        return f"{error.strerror}; shorten the key or the name"
    return f"{error}; write the name of a file in configs/, such as tiny, or a key and its value"


def _absent_key_problem(key: str, value: str) -> Problem:
    """Tell a key that no file at hand sets, and `+` adds, from one that does not exist."""
    keys = known_keys(Config)
    if key in keys or _names_a_term(key):
        rule = "is not in the config at hand; a + in front adds a term, or an option left out"
        return Problem(key, value, rule, f"write +{key}={value}")
    # Hydra's own remedy, to append the key with `+`, would only meet the next refusal.
    return unknown_key_problem(key, value, keys)


def _names_a_term(key: str) -> bool:
    """Whether the key is a whole term, or of a name of the user's own, of whatever kind that is."""
    name, _, option = key.removeprefix(_TERMS).partition(".")
    return key.startswith(_TERMS) and (name not in KINDS or not option)


def to_yaml(config: Config) -> str:
    """Write every key, resolved, as stored in the run folder's `config.yaml`."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def from_yaml(text: str) -> Config:
    """Read what `to_yaml` wrote.

    Raises:
        ConfigError: The text is not YAML, or a key is refused.
    """
    try:
        _check_stored(text)
        # Stored values are resolved. A run folder may be someone else's: an interpolation in it
        # would read this machine's environment, or grow without end.
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(f"The stored config cannot be read: {error}") from error
    return validate_config(values)


def _check_stored(text: str) -> None:
    """Refuse what `to_yaml` never writes, and what would recurse or grow without end when built."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if depth == 0 and isinstance(event, yaml.ScalarEvent | yaml.SequenceStartEvent):
            raise ValueError("it must be a YAML mapping of sections")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"*{event.anchor} repeats a value; write the value itself")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} deep; take out brackets")


def config_differences(stored: Config, given: Config) -> list[str]:
    """Name the keys in which two configs differ, keys that may change on resume left out.

    `train.steps` may change under a constant learning rate only: a cosine ends at the last step, so
    there another length means other learning rates all along.

    Returns:
        Dotted keys in alphabetical order; empty where a run may be resumed.
    """
    may_change = set(_MAY_CHANGE_ON_RESUME)
    if stored.optim.schedule == given.optim.schedule == "constant":
        may_change.add("train.steps")
    before, after = flatten(stored.model_dump()), flatten(given.model_dump())
    return sorted(
        key
        for key in before.keys() | after.keys()
        if key not in may_change and before.get(key, NOT_GIVEN) != after.get(key, NOT_GIVEN)
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested sections by dotted key; a section that is absent has none.

    Args:
        values: The sections.
        prefix: Of every key.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
