"""Turn what Hydra composed, or a run folder stored, into a validated config, and back to YAML."""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from glm_grpo.composition import COMPOSITION_ERRORS, folder_named_to_hydra, is_sweep
from glm_grpo.config.root import Config, estimator_problems
from glm_grpo.errors import ConfigError
from glm_grpo.search_path import (
    OWN_CONFIG,
    PACKAGED_CONFIGS,
    choose_config,
    find_packaged_configs,
    short_keys,
    write_out_weights,
)
from rewards.problems import (
    NOT_GIVEN,
    Problem,
    describe_problems,
    find_problems,
    known_keys,
    nearest_keys,
    suggest_value,
    unknown_key_problem,
)
from rewards.terms import KINDS
from rewards.terms.ocr import OCR_ENGINES

logger = logging.getLogger(__name__)

_TERMS = "reward.terms."
"""Keys below this prefix need not appear in a file: users choose the names of their terms."""

_MAY_CHANGE_ON_RESUME = frozenset(
    {
        # Where output goes and what is kept.
        "run_dir",
        "trackers",
        "train.resume",
        "train.resume_with_changes",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        # Where the work is done and in what portions: the keys to change when memory runs out.
        "offload",
        "reward.overlap",
        "decode.batch_size",
        "decode.vae_batch_size",
        "decode.compile",
        "model.compile",
        "model.gradient_checkpointing",
        "train.micro_batch_size",
        # Where experience is collected. (The allowed policy age, in contrast, makes a different
        # run.)
        "async.collectors",
        "async.address",
        "async.cpus_per_collector",
        "async.gpus_per_collector",
        # Labels for people; the run does the same without them.
        "run.name",
        "run.notes",
        "run.tags",
        "reward.on_hacking",
        "reward.canary_margin",
        # Decides what is refused, not what is computed.
        "reward.allow_untied",
    }
)


def resolve_config(composed: DictConfig, filled: Mapping[str, str] | None = None) -> Config:
    """Resolve and validate what Hydra composed.

    Args:
        composed: The task's config with unresolved interpolations.
        filled: Values of required keys that may be missing.

    Returns:
        A config in which every key is known, typed and in range.

    Raises:
        ConfigError: Names every refused key with its value, the rule and the remedy.
    """
    try:
        missing = OmegaConf.missing_keys(composed)
        for key, value in (filled or {}).items():
            if key in missing:
                OmegaConf.update(composed, key, value)
        missing -= (filled or {}).keys()
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"The config cannot be resolved: {error}") from error
    if missing:
        problems = [
            Problem(key, NOT_GIVEN, "is required and has no default", suggest_value(key, Config))
            for key in sorted(missing)
        ]
        raise ConfigError(describe_problems(problems))
    if isinstance(values, dict) and not values.keys() & {"model", "rollout", "reward"}:
        raise ConfigError(
            "The config builds on no other: begin its file with `defaults: [tiny, _self_]`, or "
            "with the name of another packaged config"
        )
    _refuse_added_nulls()
    _leave_out_other_engines(values)
    config = validate_config(values)
    _check_folder(config)
    return config


def _typed_words() -> Sequence[str]:
    """Overrides of the command line."""
    return HydraConfig.get().overrides.task if HydraConfig.initialized() else ()


def _refuse_added_nulls() -> None:
    """Refuse `+reward.terms.NAME=null`, which would be ignored: `+` only adds absent keys.

    Raises:
        ConfigError: A word has that form.
    """
    found = (re.fullmatch(r"\+(reward\.terms\.\w+)=null", word) for word in _typed_words())
    problems = [_absent_term_problem(match[1]) for match in found if match is not None]
    if problems:
        raise ConfigError(describe_problems(problems))


def _leave_out_other_engines(values: Any) -> None:
    """Remove options of OCR engines that a term does not use, unless they were typed.

    Presets set the options of their own engine, and a file may set those of both, so that one key
    switches the engine. Anything that is not a term is left to the validation.
    """
    typed = {word.lstrip("+").partition("=")[0] for word in _typed_words()}
    reward = values.get("reward")
    terms = reward.get("terms") if isinstance(reward, dict) else None
    known = {option for form in OCR_ENGINES.values() for option in form.model_fields}
    for name, options in terms.items() if isinstance(terms, dict) else ():
        engine = options.get("engine") if isinstance(options, dict) else None
        if not isinstance(engine, str) or engine not in OCR_ENGINES:
            continue
        for option in (known - OCR_ENGINES[engine].model_fields.keys()) & options.keys():
            if f"{_TERMS}{name}.{option}" not in typed:
                del options[option]


def _check_folder(config: Config) -> None:
    """Refuse a run whose folder is set twice, by `run_dir` and by Hydra's own key.

    Raises:
        ConfigError: The two differ, or all jobs of a sweep would write into one folder.
    """
    named = folder_named_to_hydra()
    if named is None:
        return
    if is_sweep():
        raise ConfigError(
            f"hydra.run.dir = {HydraConfig.get().run.dir!r} names one folder for all runs of a "
            "sweep; set hydra.sweep.dir, in which each run gets its own"
        )
    if Path(os.path.abspath(config.run_dir)) != Path(os.path.abspath(named)):
        raise ConfigError(
            f"run_dir = {config.run_dir!r} and hydra.run.dir = {HydraConfig.get().run.dir!r} name "
            "two folders for one run; leave one of them out"
        )


def validate_config(values: object, *, is_stored: bool = False) -> Config:
    """Validate plain values read from YAML.

    Args:
        values: The sections.
        is_stored: Whether these are the values of an existing run. `estimator_problems` used to be
            allowed, so such a run can still be read.

    Raises:
        ConfigError: Names every refused key with its value, the rule and the remedy.
    """
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems = find_problems(error, Config, values)
        raise ConfigError(describe_problems(problems)) from error
    problems = [] if is_stored else estimator_problems(config.loss)
    if problems:
        raise ConfigError(describe_problems(problems))
    return config


def compose_config(
    config_dir: Path | None,
    name: str | None,
    overrides: Sequence[str] = (),
    *,
    filled: Mapping[str, str] | None = None,
) -> Config:
    """Compose a config as `train.py --config-name NAME key=value ...` does, from any folder.

    Args:
        config_dir: The user's own config folder, whose configs may build on the package's; None:
            use the package's configs only.
        name: Config name without `.yaml`; None: `config` if `config_dir` has one, else `tiny`; with
            neither, `train.resume=RUN` takes the run's own config.
        overrides: As on the command line; `ocr=0.5` means `reward.terms.ocr.weight=0.5`.
        filled: Values of required keys that may be missing.

    Raises:
        ConfigError: The name or an override is unknown, or a value is refused.
    """
    given = name
    folder, name = choose_config(config_dir, given, overrides)
    if config_dir is not None and given is not None:
        _warn_of_unused(folder, given)
    overrides = with_whole_weights(overrides, folder, name)
    find_packaged_configs()
    try:
        with initialize_config_dir(str(folder), version_base=None):
            composed = compose(name, overrides=overrides, return_hydra_config=True)
    except COMPOSITION_ERRORS as error:
        raise composition_error(error) from error
    with _hydra_settings(composed):
        return resolve_config(composed, filled)


def _warn_of_unused(folder: Path, name: str) -> None:
    own = folder / f"{OWN_CONFIG}.yaml"
    if own.is_file() and not (folder / f"{name}.yaml").is_file():
        logger.warning("%s is not used, because another config is named: %s", own, name)


def with_whole_weights(
    words: Sequence[str], config_dir: Path | None, name: str | None
) -> list[str]:
    """Rewrite `ocr=0.5` in command-line words as `reward.terms.ocr.weight=0.5`.

    Args:
        words: Command-line words; those that name no term are returned unchanged.
        config_dir: As in `compose_config`.
        name: As in `compose_config`.

    Raises:
        ConfigError: A group of configs is null or a number.
    """
    keys = {key.partition(".")[0] for key in known_keys(Config)}
    groups = {path.name for path in PACKAGED_CONFIGS.iterdir() if path.is_dir()}
    terms = set(KINDS)
    for word in words:
        group, _, value = word.partition("=")
        # Hydra takes neither null nor a number there.
        if group in groups and re.fullmatch(r"null|[-+.\d]+", value):
            names = sorted(path.stem for path in (PACKAGED_CONFIGS / group).glob("*.yaml"))
            raise ConfigError(f"{word}: name one of its files, such as {group}={names[0]}")
    if short_keys(words) - keys - groups - terms:
        terms |= _terms_of(config_dir, name, [word for word in words if word.startswith("reward=")])
    return write_out_weights(words, terms)


def _terms_of(config_dir: Path | None, name: str | None, overrides: Sequence[str]) -> set[str]:
    """Names of a config's terms; empty if it cannot be composed, which is reported elsewhere."""
    folder, name = choose_config(config_dir, name)
    find_packaged_configs()
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return set(compose(name, overrides=list(overrides)).reward.terms)
    except COMPOSITION_ERRORS:
        return set()


@contextmanager
def _hydra_settings(composed: DictConfig) -> Iterator[None]:
    """Move Hydra's own section out of the config, to where Hydra keeps it while a job runs."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(composed)
    with open_dict(composed):
        del composed["hydra"]
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def composition_error(error: Exception) -> ConfigError:
    """Like `override_error`, for commands that accept a config folder.

    Args:
        error: One of `COMPOSITION_ERRORS`.
    """
    if isinstance(error, OverrideParseException) and os.path.isdir(error.override):
        folder = shlex.quote(error.override)
        return ConfigError(f"{folder} is a folder: did you mean --config-dir {folder}?")
    return override_error(error)


def parse_override(override: str) -> tuple[str, object]:
    """Split one override into key and value, as train.py does.

    Args:
        override: `key=value`.

    Raises:
        ConfigError: The override does not have that form.
    """
    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
    except HydraException as error:
        raise override_error(error) from error
    if parsed.is_delete() or parsed.is_sweep_override():
        raise ConfigError(f"{override!r} is not a single value; write one per key, such as ocr=0.5")
    return parsed.key_or_group, parsed.value()


def shell_override(key: str, value: str) -> str:
    """Format an override with a text value, quoted for both the shell and Hydra.

    Args:
        key: Dotted key.
        value: Text value, such as the path of a run.
    """
    override = f"{key}={value}"
    if _read_override(override) != value:
        override = f"{key}={QuotedString(value, Quote.double).with_quotes()}"
    return shlex.quote(override)


def _read_override(override: str) -> object:
    """The override's value; None if it has no value, or several."""
    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
    except HydraException:
        return None
    return None if parsed.is_sweep_override() else parsed.value()


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


def override_error(error: Exception) -> ConfigError:
    """Describe what Hydra refused; for an unknown key, suggest the one probably meant.

    Args:
        error: One of `COMPOSITION_ERRORS`.
    """
    unknown = re.search(r"use \+([^=\s]+)=(.*)", str(error))
    if unknown is not None:
        return ConfigError(describe_problems([_absent_key_problem(unknown[1], unknown[2])]))
    message, _, places = str(error).partition("Config search path:")
    message = message.strip()
    if isinstance(error, OverrideParseException):
        message = _describe_unread(error.override, message)
    elif decimal := re.match(r"Ambiguous value for argument '(.*\.weight)=(-?\d+),(\d+)'", message):
        key, whole, digits = decimal.groups()
        message = (
            f"{key}={whole},{digits} is a list; for one number, write {key}={whole}.{digits}. "
            "`glm-grpo train -m` trains with each value of a list"
        )
    elif several := re.match("Ambiguous value for argument '(.*)'", message):
        written = shell_override(*several[1].split("=", 1))
        message = re.sub("(quote the value: ).*", lambda found: found[1] + written, message)
    elif folder := re.search(r"config directory '(.*)'", message):
        return ConfigError(_describe_missing_folder(Path(folder[1])))
    elif isinstance(error, MissingConfigException) and error.options is None:
        folders = [Path(place) for place in re.findall("path=file://(.*)", places)]
        message = f"{message.partition(' Check that')[0]} {_choose_config(error, folders)}"
    elif isinstance(error, MissingConfigException):
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        message = f"{group}={choice}: {_choose(choice, error.options or ())}"
    elif isinstance(error.__cause__, OmegaConfBaseException):
        message += f"\n{error.__cause__}"
    return ConfigError(f"The config cannot be composed: {message}")


def _describe_unread(override: str, message: str) -> str:
    key, equals, value = override.partition("=")
    if not equals or key != key.strip():
        return (
            f"{override!r} is not of the form key=value. Leave no space around =, as in ocr=0.5, "
            "and quote a word that contains spaces, as in 'data.path=my prompts.txt'"
        )
    closing = {"{": "}", "[": "]"}.get(value[:1])
    if closing is not None and value.count(value[0]) > value.count(closing):
        return (
            f"{override!r} lacks a closing bracket; the shell may have cut it at a space: quote "
            "the whole word, as in 'model.adapter={rank: 16}'"
        )
    written = shell_override(key, value)
    refused, _, marked = message.partition("\n")
    is_text = _read_override(*shlex.split(written)) == value
    why = f": {refused}"
    if refused.startswith("LexerNoViableAltException"):
        # This message only repeats the override, with a mark below the refused character.
        character = refused[marked.index("^")]
        why = f": Hydra reads {character} only inside quotation marks" if is_text else ""
    if not is_text:
        return f"{override!r} is not of the form key=value{why}"
    return (
        f"the value of {override!r} cannot be read{why}. To pass it as text, quote it for Hydra "
        f"and for the shell: {written}"
    )


def _choose_config(error: MissingConfigException, folders: Sequence[Path]) -> str:
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    folders = [folder / group for folder in folders if (folder / group).is_dir()] or folders
    names = {file.stem for folder in folders for file in folder.glob("*.yaml")}
    return f"{_choose(choice, names)} (of {' and '.join(map(str, folders))})."


def _describe_missing_folder(folder: Path) -> str:
    beside = {file.parent.name for file in folder.parent.glob("*/*.yaml")}
    remedy = (
        f"{_choose(folder.name, beside)} in {folder.parent}"
        if beside
        else "Give your own folder, such as one made by `glm-grpo init my-run`, or leave it out"
    )
    return f"There is no config folder {folder}. {remedy}."


def _choose(given: str, choices: Collection[str]) -> str:
    nearest = difflib.get_close_matches(given, choices, n=1, cutoff=0.5)
    meant = f"Did you mean {nearest[0]}? " if nearest else ""
    verb = "is" if len(choices) == 1 else "are"
    return f"{meant}There {verb} {', '.join(sorted(choices))}"


def _absent_key_problem(key: str, value: str) -> Problem:
    """Distinguish a key that exists but needs `+`, because no file sets it, from an unknown key."""
    if value == "null" and re.fullmatch(r"reward\.terms\.\w+", key):
        return _absent_term_problem(key)
    if key in KINDS:
        rule = "is the weight of a reward term, which must be a number"
        whole = f"{_TERMS}{key}.weight=0.5"
        remedy = f"write {key}=0.5, short for {whole}, or +{whole} if the config has no such term"
        return Problem(key, value, rule, remedy)
    keys = known_keys(Config)
    if key in keys or _names_a_term(key):
        rule = "is not in this config; put + in front to add a term, or an option that is left out"
        is_term = re.fullmatch(r"reward\.terms\.\w+", key) is not None
        is_weight = is_term and isinstance(_read_override(f"{key}={value}"), int | float)
        whole = f"+{key}.weight={value}" if is_weight else f"+{key}={value}"
        return Problem(key, value, rule, f"write {shlex.quote(whole)}")
    names = {name for known in keys for name in (known.partition(".")[0], known.split(".")[-1])}
    nearest = difflib.get_close_matches(key, [*names, *KINDS], n=1)
    if nearest and nearest[0] in KINDS:
        rule = f"is neither a section of the config nor a reward term ({', '.join(KINDS)})"
        return Problem(key, value, rule, f"did you mean {nearest[0]}={value}?")
    # Hydra suggests appending the key with `+`, which would only be refused next.
    return unknown_key_problem(key, value, keys)


def keys_meant(name: str) -> list[str]:
    """Keys of the config that were probably meant by this name, best first; empty if none is."""
    return nearest_keys(name, known_keys(Config))


def _absent_term_problem(key: str) -> Problem:
    """Refuse to remove a term that the config does not have; it is probably misspelled."""
    nearest = difflib.get_close_matches(key.removeprefix(_TERMS), KINDS, n=1)
    meant = nearest[0] if nearest and f"{_TERMS}{nearest[0]}" != key else None
    rule = "null removes a term, and the config has no term of this name"
    remedy = "leave it out" if meant is None else f"did you mean {_TERMS}{meant}=null?"
    return Problem(key, None, rule, remedy)


def _names_a_term(key: str) -> bool:
    """Whether the key is a whole term (a user-chosen name of any kind)."""
    name, _, option = key.removeprefix(_TERMS).partition(".")
    return key.startswith(_TERMS) and (name not in KINDS or not option)


def to_yaml(config: Config) -> str:
    """Write every key, resolved, in the form of the run folder's `config.yaml`."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def from_yaml(text: str) -> Config:
    """Read a config written by `to_yaml`.

    Raises:
        ConfigError: The text is not YAML, or a key is refused.
    """
    # An option of terms that runs stored and that is gone.
    text = re.sub(r"^ +run_in: thread\n", "", text, flags=re.MULTILINE)
    try:
        # Stored values are resolved; interpolating could read settings of this machine. The C
        # loader takes a tenth of the time, and every refresh of the gallery reads this.
        values = yaml.load(text, Loader=yaml.CSafeLoader)
    except YAMLError as error:
        raise ConfigError(f"The stored config cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("The stored config cannot be read: it must be a YAML mapping of sections")
    return validate_config(values, is_stored=True)


def config_differences(stored: Config, given: Config) -> list[str]:
    """List the keys in which two configs differ, except those that may change on resume.

    `train.steps` may change only under a constant learning rate: a cosine ends at the last step, so
    another length changes the learning rate of every step. The same applies to
    `anchor.final_weight`. The estimator of a KL with weight 0 may change, too.

    Returns:
        Dotted keys in alphabetical order; empty if the run may be resumed.
    """
    may_change = set(_MAY_CHANGE_ON_RESUME)
    is_anchor_constant = all(each.anchor.final_weight is None for each in (stored, given))
    if stored.optim.schedule == given.optim.schedule == "constant" and is_anchor_constant:
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
