"""Overrides of a run's config that change how its stored scores are weighed, and nothing else."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from glm_grpo.config import Config, flatten, override_error, validate_config
from glm_grpo.config.problems import Problem, describe_problems, known_keys
from glm_grpo.errors import ConfigError
from glm_grpo.rescore.rescoring import SettingChange
from rewards.terms_config import KINDS

_TERM_OPTIONS = ("weight", "std_floor")
_CHANGEABLE = re.compile(
    r"reward\.combine|advantage\.\w+"
    rf"|reward\.terms\.(?P<term>\w+)\.({'|'.join(_TERM_OPTIONS)})"
)
_CHANGEABLE_IN_WORDS = "reward.terms.<name>.weight and .std_floor, reward.combine, advantage.*"
_LEAST_SIMILARITY = 0.75
"""Of two keys, by difflib, below which one is no misspelling of the other; most of a key is the
sections it stands in, which many keys share."""


def override_weighing(config: Config, overrides: Sequence[str]) -> Config:
    """The config of a run with other weights, another combination or other advantages.

    Args:
        config: Of the run.
        overrides: `key=value` with the keys `reward.terms.<name>.weight`,
            `reward.terms.<name>.std_floor`, `reward.combine` and `advantage.*`, written as for
            train.py.

    Raises:
        ConfigError: A key is another one, names a term the run did not score, or a value is
            refused.
    """
    values: dict[str, Any] = config.model_dump(mode="json")
    # What is only tried out harms no policy: a watched term may be weighed, and one that looks at
    # the picture alone may stand by itself.
    values["reward"] |= {"watch": [], "allow_untied": True}
    problems = []
    for override in overrides:
        key, value = _parse_override(override)
        problem = _find_problem(key, value, config)
        if problem is not None:
            problems.append(problem)
            continue
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    if problems:
        raise ConfigError(describe_problems(problems))
    return validate_config(values, is_stored=True)


def list_changes(
    config: Config, other: Config, overrides: Sequence[str]
) -> tuple[SettingChange, ...]:
    """What overrides set to something else than the run had.

    Args:
        config: Of the run.
        other: The same with the overrides, see `override_weighing`.
        overrides: `key=value`; a key that keeps its value is left out.
    """
    before, after = config.model_dump(mode="json"), other.model_dump(mode="json")
    keys = dict.fromkeys(_parse_override(override)[0] for override in overrides)
    changes = (SettingChange(key, _look_up(before, key), _look_up(after, key)) for key in keys)
    return tuple(change for change in changes if change.before != change.after)


def _parse_override(override: str) -> tuple[str, object]:
    """Key and value, read as train.py reads them."""
    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
    except HydraException as error:
        raise override_error(error) from error
    if parsed.is_delete() or parsed.is_sweep_override():
        raise ConfigError(
            f"{override!r} gives no value; rescore tries one value a key: write "
            "reward.terms.ocr.weight=0.5, say"
        )
    return parsed.key_or_group, parsed.value()


def _find_problem(key: str, value: object, config: Config) -> Problem | None:
    match = _CHANGEABLE.fullmatch(key)
    if match is None:
        rule = (
            "is not a key that rescore can change: images and raw scores are what the run stored. "
            f"It can change {_CHANGEABLE_IN_WORDS}"
        )
        return Problem(key, value, rule, _remedy_for_other_key(key, value, config))
    name = match["term"]
    if name is None or name in config.reward.terms:
        return None
    rule = (
        f"the run did not score {name!r}, so no table holds its scores; it scored "
        f"{', '.join(config.reward.terms)}"
    )
    return Problem(key, value, rule, _remedy_for_other_term(name, config))


def _remedy_for_other_key(key: str, value: object, config: Config) -> str:
    if key in known_keys(Config) or key in flatten(config.model_dump(mode="json")):
        return f"train a run with it: python train.py {key}={value}"
    terms = itertools.product(config.reward.terms, _TERM_OPTIONS)
    keys = [
        "reward.combine",
        *(f"reward.terms.{name}.{option}" for name, option in terms),
        *(f"advantage.{option}" for option in type(config.advantage).model_fields),
    ]
    nearest = difflib.get_close_matches(key, keys, n=1, cutoff=_LEAST_SIMILARITY)
    return f"did you mean {nearest[0]}?" if nearest else f"use one of {_CHANGEABLE_IN_WORDS}"


def _remedy_for_other_term(name: str, config: Config) -> str:
    if name in KINDS:
        return (
            f"use one of those, or train a run that scores {name} too, with weight 0 if it is only "
            f"to be shown: python train.py +reward.terms.{name}.weight=0"
        )
    nearest = difflib.get_close_matches(name, config.reward.terms, n=1)
    return f"did you mean reward.terms.{nearest[0]}?" if nearest else "use one of those"


def _look_up(values: Mapping[str, Any], key: str) -> object:
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found
