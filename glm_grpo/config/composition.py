"""Compose a config with Hydra: find its files, apply the command line, resolve and validate it.

`ocr=0.5` on the command line is short for `reward.terms.ocr.weight=0.5`. What Hydra refuses is
reported in Hydra's words, with the key that was probably meant.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.constructor import ConstructorError

from glm_grpo.config.load import check_yaml, validate_config
from glm_grpo.config.other_trainers import counterpart_of
from glm_grpo.config.paths import with_function_folders
from glm_grpo.config.renamed import new_key, with_new_keys
from glm_grpo.config.root import Config
from glm_grpo.errors import ConfigError
from rewards.problems import known_keys, nearest_keys, walk_fields
from rewards.terms import KINDS
from rewards.terms.ocr import OCR_ENGINES

_PACKAGE = Path(__file__).resolve().parents[1]
_IN_WHEEL, _IN_CLONE = _PACKAGE / "configs", _PACKAGE.parent / "configs"

PACKAGED_CONFIGS = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CLONE
"""Folder with `tiny.yaml` and the config groups."""

OWN_CONFIG = "config"
"""Name of the config in a user's folder, as `glm-grpo init` writes it."""

_TERMS = "reward.terms."
_KEYS = known_keys(Config)
_LISTS = {key for key, field in walk_fields(Config) if "tuple[" in str(field.annotation)}
_OPTIONS = {key.rpartition(".")[2] for key in _KEYS if key.startswith(_TERMS)}
"""Options of any kind of term."""
_TERM_NAME = re.compile("[a-z][a-z0-9_]*")
_TIME_OF_DAY = re.compile(r"\d\d-\d\d-\d\d")

_dated: set[str] = set()
"""Run folders whose names a config made from the time, see `is_dated`."""


def compose_config(
    config_dir: Path | None, name: str | None, overrides: Sequence[str] = ()
) -> Config:
    """Compose a config as `train.py --config-name NAME key=value ...` does, from any folder.

    Args:
        config_dir: The user's own config folder, whose configs may build on the package's; None:
            use the package's configs only.
        name: Config name; None: see `choose_config`.
        overrides: As on the command line; `ocr=0.5` means `reward.terms.ocr.weight=0.5`.
    """
    folder, name = choose_config(config_dir, name, overrides)
    find_packaged_configs()
    with (
        composition_errors(overrides),
        checked_files(),
        initialize_config_dir(str(folder), version_base=None),
    ):
        whole = write_out_weights(overrides, folder)
        composed = compose(name, overrides=whole, return_hydra_config=True)
    with _hydra_settings(composed):
        return resolve_config(composed)


def resolve_config(composed: DictConfig) -> Config:
    """Resolve and validate what Hydra composed.

    Args:
        composed: The task's config with unresolved interpolations.
    """
    with composition_errors():
        values: Any = OmegaConf.to_container(composed, resolve=True)
    if not values.keys() & {"model", "rollout", "reward"}:
        raise ConfigError(
            "The config builds on no other: begin its file with `defaults: [tiny, _self_]`, or "
            "with the name of another packaged config"
        )
    values = _without_missing(values)
    _leave_out_other_engines(values)
    # The script's own folder is where Python finds modules, too.
    places: list[str | Path] = [Path.cwd(), sys.path[0]]
    if HydraConfig.initialized():
        places.insert(0, primary_folder())
    return with_function_folders(validate_config(values), places)


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


def _without_missing(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out keys whose value is `???`, so that the validation names all of them."""
    return {
        key: _without_missing(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != MISSING
    }


def _leave_out_other_engines(values: dict[str, Any]) -> None:
    """Remove options of OCR engines that a term does not use, unless they were typed.

    Presets set the options of their own engine, and a file may set those of both, so that one key
    switches the engine. Anything that is not a term is left to the validation.
    """
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    typed = {word.lstrip("+").partition("=")[0] for word in words}
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


class _PackagedConfigs(SearchPathPlugin):
    """Makes Hydra search the package after the given folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        places = {(entry.path or "").removeprefix("file://") for entry in search_path.get_path()}
        if str(PACKAGED_CONFIGS) not in places:
            search_path.append(provider="glm-grpo", path=f"file://{PACKAGED_CONFIGS}")


class _CheckedFiles(FileConfigSource):
    """Makes Hydra refuse files that YAML would misread, and read stored runs with today's keys."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.is_file():
            check_yaml(path.read_bytes(), str(path))
        result = super().load_config(config_path)
        values: Any = OmegaConf.to_container(result.config)
        if _is_of_run(values):
            result.config = OmegaConf.create(with_new_keys(values))
        return result


def find_packaged_configs() -> None:
    """Let configs in a user's folder build on those of the package from now on."""
    Plugins.instance().register(_PackagedConfigs)


@contextmanager
def checked_files() -> Iterator[None]:
    """Refuse files that YAML would misread; afterwards, other programs of Hydra read as before."""
    types, scheme = SourcesRegistry.instance().types, _CheckedFiles.scheme()
    before = types[scheme]
    types[scheme] = _CheckedFiles
    try:
        yield
    finally:
        types[scheme] = before


def choose_config(
    config_dir: Path | None, name: str | None, overrides: Sequence[str] = ()
) -> tuple[Path, str]:
    """Choose the folder that Hydra searches first, and the config's name.

    Args:
        config_dir: The user's own config folder; None: that of the package.
        name: Name as given; None: `config` if the folder has one, else `tiny`.
        overrides: Without folder and name, `train.resume=RUN` among these chooses that run's own
            config, unless others add a key, remove one or choose a file of a group: these belong to
            the config that the run was composed from.
    """
    if config_dir is None and name is None and not any(map(_composes, overrides)):
        config_dir = _resumed_run(overrides)
    folder = PACKAGED_CONFIGS if config_dir is None else config_dir.absolute()
    if name is None:
        has_own = config_dir is not None and (folder / f"{OWN_CONFIG}.yaml").is_file()
        name = OWN_CONFIG if has_own else "tiny"
    if not folder.is_dir():
        made = shlex.quote(str(config_dir))
        raise ConfigError(f"There is no folder {config_dir}. `glm-grpo init {made}` makes one")
    if folder != PACKAGED_CONFIGS:
        _refuse_overridden(folder / f"{name}.yaml")
    return folder, name


def _refuse_overridden(path: Path) -> None:
    """Refuse a file that a packaged config after `_self_` overrides in every key."""
    values: Any = None
    # Hydra reports what it cannot read.
    with suppress(OSError, YAMLError):
        values = yaml.safe_load(path.read_bytes())
    defaults = values.get("defaults") if isinstance(values, dict) else None
    if not isinstance(defaults, list) or "_self_" not in defaults or len(values) == 1:
        return
    for base in defaults[defaults.index("_self_") + 1 :]:
        if isinstance(base, str) and (PACKAGED_CONFIGS / f"{base}.yaml").is_file():
            raise ConfigError(
                f"{path}: in `defaults`, `_self_` stands before `{base}`, which then overrides the "
                "keys of this file; put `_self_` last"
            )


def _composes(word: str) -> bool:
    """Whether an override adds a key, removes one, or chooses a file of a group."""
    return word.startswith(("+", "~")) or _is_group(word.partition("=")[0])


def _is_group(name: str, config_dir: Path = PACKAGED_CONFIGS) -> bool:
    folders = (PACKAGED_CONFIGS / name, config_dir / name)
    return any(path for folder in folders for path in folder.glob("*.yaml"))


def _resumed_run(overrides: Iterable[str]) -> Path | None:
    """Folder of the run that `train.resume=RUN` names; None if there is none."""
    for override in overrides:
        if override.startswith("train.resume="):
            given = Path(os.path.expanduser(str(parse_override(override)[1])))
            # The run may be named by one of its checkpoints, RUN/checkpoints/step-000010.
            for folder in (given, given.absolute().parent.parent):
                if (folder / f"{OWN_CONFIG}.yaml").is_file():
                    return folder
    return None


def hydra_settings_of_run(folder: Path, name: str) -> list[str]:
    """Overrides that give a run's stored config the settings of Hydra that it does not contain.

    Without them, Hydra would log in its own format and make folders. Empty for other configs.
    """
    path = folder / f"{name}.yaml"
    with suppress(OSError, YAMLError):
        values = yaml.safe_load(path.read_bytes())
        if _is_of_run(values):
            run_dir = QuotedString(str(values["run_dir"]), Quote.double).with_quotes()
            return ["+run=dated", "hydra/job_logging=stdout", f"run_dir={run_dir}"]
    return []


def _is_of_run(values: object) -> bool:
    """Whether these are all of a run's settings, which build on no other config."""
    return isinstance(values, dict) and "run_dir" in values and "defaults" not in values


def write_out_weights(words: Iterable[str], config_dir: Path = PACKAGED_CONFIGS) -> list[str]:
    """Rewrite `ocr=0.5` as `reward.terms.ocr.weight=0.5`, `ocr=null` as `++reward.terms.ocr=null`.

    A name without a dot is that of a term, unless the config has a key of that name, or there is a
    group of config files. An option of a term gets `++`, too, because files leave out most options.

    Args:
        words: Overrides; any others are unchanged.
        config_dir: The user's own config folder, which may have groups.
    """
    return [_write_out(word, config_dir) for word in words]


def _expand_home(word: str) -> str:
    """Expand the tilde of `run_dir=~/mine`, which shells leave and Hydra refuses."""
    name, equals, value = word.partition("=")
    is_path = re.match(r"~\w*/", value) is not None
    return f"{name}{equals}{os.path.expanduser(value) if is_path else value}"


def _write_out(word: str, config_dir: Path) -> str:
    word = _expand_home(word)
    name, equals, value = word.partition("=")
    # Hydra takes a number for an error of its own.
    if _is_group(name, config_dir) and re.fullmatch(r"[-+.\d]+", value):
        raise ConfigError(f"{word}: {name} is a group of files; name one, without .yaml")
    if _is_added_to_term(name):
        return f"++{word}"
    is_term = _TERM_NAME.fullmatch(name) and name not in _KEYS and not _is_group(name, config_dir)
    if not equals or not is_term:
        return word
    if value != "null":
        return f"{_TERMS}{name}.weight={value}"
    # The stored config of a run to resume lacks a term that was left out the first time.
    return f"{'++' * (name in KINDS)}{_TERMS}{name}=null"


def _is_added_to_term(key: str) -> bool:
    """Whether a term may lack this option; every term has a weight, and a kind makes a new one."""
    section, _, option = key.rpartition(".")
    is_term = section.startswith(_TERMS) and "." not in section.removeprefix(_TERMS)
    return is_term and option in _OPTIONS - {"weight", "kind"}


def parse_override(override: str) -> tuple[str, object]:
    """Split one override into key and value, as train.py does.

    Args:
        override: `key=value`.
    """
    with composition_errors():
        (parsed,) = OverridesParser.create().parse_overrides([_expand_home(override)])
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
    with suppress(ConfigError):
        if parse_override(override)[1] == value:
            return shlex.quote(override)
    return shlex.quote(f"{key}={QuotedString(value, Quote.double).with_quotes()}")


@contextmanager
def composition_errors(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Pass on what Hydra says about files and overrides from which it cannot compose a config.

    Args:
        overrides: As typed, to find misspelled keys.
    """
    _refuse_names_in_lists(overrides)
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        keys = [override.lstrip("+~").partition("=")[0].strip() for override in overrides]
        if all(map(_is_known, keys)):
            # The key is inside a section that was given as a whole.
            keys = [str(getattr(error.__cause__, "full_key", ""))]
        meant = {key: _nearest_keys(key) for key in keys if not _is_known(key)}
        if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
            # Those of the group in which it was looked for.
            names = error.options or [path.stem for path in PACKAGED_CONFIGS.glob("*.yaml")]
            name = str(error.missing_cfg_file).rpartition("/")[2]
            meant[name] = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        is_cispo = "loss=cispo" in overrides
        said = {}
        for key, near in meant.items():
            if new := new_key(key, is_cispo=is_cispo):
                said[key] = f"{key} is now {new}"
            elif theirs := counterpart_of(key):
                said[key] = f"{key}: {theirs}"
            elif near:
                said[key] = f"{key}: did you mean {' or '.join(near)}?"
        reason = _without_answered(_describe(error), said.keys())
        message = "\n".join(filter(None, [*said.values(), reason]))
        raise ConfigError(f"The config cannot be composed: {message}") from error


def _without_answered(reason: str, answered: Set[str]) -> str:
    """Leave out of Hydra's reason what does not help once these keys have an answer of ours."""
    if not answered:
        return reason
    refused = re.match(r"Could not override '(.+)'", reason)
    if refused and answered & {refused[1], refused[1].removeprefix(_TERMS).removesuffix(".weight")}:
        return ""
    # A key that does not exist would be refused with a + as well.
    if not (refused and _is_known(refused[1])):
        reason = re.sub(r"\nTo append to your config use \+.*", "", reason)
    return re.sub(
        r"( Check that it's in [^\n]*)?\s*Config search path:.*", "", reason, flags=re.DOTALL
    )


def _describe(error: Exception) -> str:
    """An error in the words of its library, without the first line of a file with a key twice."""
    if isinstance(error, ConstructorError) and (mark := error.problem_mark):
        problem = error.problem or ""
        if "duplicate key" in problem:
            return f"{mark.name}, line {mark.line + 1}: {problem}; keep one"
    return str(error)


def _refuse_names_in_lists(overrides: Iterable[str]) -> None:
    """Refuse a name below the key of a list, which OmegaConf takes for an index."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        section, _, name = key.rpartition(".")
        if section in _LISTS and not name.isdigit():
            raise ConfigError(
                f"{override}: {section} is a list without keys; write {section}="
                f"[{value.strip('[]')}]"
            )


def _is_known(key: str) -> bool:
    # Below `hydra`, and with / or @, keys are Hydra's.
    if key in (*_KEYS, *KINDS) or re.search("[/@]|^hydra", key) or _is_group(key):
        return True
    return any(known.startswith(f"{key}.") for known in _KEYS)


def _nearest_keys(key: str) -> list[str]:
    if key.startswith(_TERMS):
        return difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.9)
    kinds = [] if "." in key else difflib.get_close_matches(key, KINDS, n=1)
    return kinds or nearest_keys(key, _KEYS)


def is_sweep() -> bool:
    """Whether Hydra trains several runs one after the other in this process."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def is_dated(run_dir: str) -> bool:
    """Whether a config made the run folder's name from the time, rather than a user naming it."""
    return run_dir in _dated


def primary_folder() -> str:
    """Folder of the config that Hydra composed, while it runs a job."""
    sources = HydraConfig.get().runtime.config_sources
    return next(source.path for source in sources if source.provider == "main")


def _sweep_folder_or(run_dir: str) -> str:
    if is_sweep():
        return str(HydraConfig.get().runtime.output_dir)
    # `run/dated.yaml` sets it to the current folder, so that Hydra creates none.
    if HydraConfig.initialized() and Path(HydraConfig.get().run.dir) != Path():
        return str(Path(HydraConfig.get().run.dir).absolute())
    if _TIME_OF_DAY.fullmatch(Path(run_dir).name):
        _dated.add(run_dir)
    return run_dir


# `${config_dir:}` in a YAML file: the folder that Hydra searched first, so that prompt files next
# to a config are found from any working directory.
OmegaConf.register_new_resolver("config_dir", primary_folder, replace=True)
# `${sweep_folder_or:FOLDER}` in a YAML file: in a sweep, the folder that Hydra created for this
# run; otherwise `hydra.run.dir` if it was set; otherwise FOLDER. No key of Hydra covers all of
# these.
OmegaConf.register_new_resolver("sweep_folder_or", _sweep_folder_or, replace=True)
