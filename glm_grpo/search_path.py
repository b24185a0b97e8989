"""Find configs: first in the user's folder, then in the package.

Imports nothing heavy, because mistakes on the command line are reported before heavy imports.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from yaml import YAMLError

from glm_grpo.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL, _IN_CLONE = _PACKAGE / "configs", _PACKAGE.parent / "configs"

PACKAGED_CONFIGS = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CLONE
"""Folder with `tiny.yaml` and the config groups."""

OWN_CONFIG = "config"
"""Name of the config in a user's folder, as `glm-grpo init` writes it."""

_PROVIDER = "glm-grpo"
_SHORT_NUMBER = re.compile(
    r"[a-z][a-z0-9_]*=([-+.\d]|null$|(choice|range|interval|sort|shuffle)\()"
)
_SHORT_WEIGHT = re.compile(r"([a-z][a-z0-9_]*)=")


class _PackagedConfigs(SearchPathPlugin):
    """Makes Hydra search the package after the given folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        places = {(entry.path or "").removeprefix("file://") for entry in search_path.get_path()}
        if str(PACKAGED_CONFIGS) not in places:
            search_path.append(provider=_PROVIDER, path=f"file://{PACKAGED_CONFIGS}")


def find_packaged_configs() -> None:
    """Let configs in a user's folder build on those of the package from now on."""
    Plugins.instance().register(_PackagedConfigs)


def choose_config(
    config_dir: Path | None, name: str | None, words: Iterable[str] = ()
) -> tuple[Path, str]:
    """Choose the folder that Hydra searches first, and the config's name.

    Args:
        config_dir: The user's own config folder; None: that of the package.
        name: Name as given; None: `config` if the folder has one, else `tiny`.
        words: Overrides; without folder and name, `train.resume=RUN` chooses that run's own config,
            unless others add a key, remove one or choose a file of a group: these belong to the
            config that the run was composed from.

    Raises:
        ConfigError: The folder is a file.
    """
    words = tuple(words)
    if config_dir is None and name is None and not any(map(_composes, words)):
        config_dir = _resumed_run(words)
    folder = PACKAGED_CONFIGS if config_dir is None else config_dir.absolute()
    if folder.is_file():
        raise ConfigError(
            f"--config-dir {config_dir} is a file; give the folder that contains it: --config-dir "
            f"{folder.parent}"
        )
    has_own = config_dir is not None and (folder / f"{OWN_CONFIG}.yaml").is_file()
    if name is None:
        name = OWN_CONFIG if has_own else "tiny"
    return folder, name


def _composes(word: str) -> bool:
    """Whether an override adds a key, removes one, or chooses a file of a group."""
    return word.startswith(("+", "~")) or (PACKAGED_CONFIGS / word.partition("=")[0]).is_dir()


def _resumed_run(words: Iterable[str]) -> Path | None:
    """Folder of the run that `train.resume=RUN` names; None if there is none."""
    for word in words:
        if not word.startswith("train.resume="):
            continue
        with suppress(HydraException):
            given = Path(str(OverridesParser.create().parse_override(word).value())).expanduser()
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
        if isinstance(values, dict) and "run_dir" in values and "defaults" not in values:
            run_dir = QuotedString(str(values["run_dir"]), Quote.double).with_quotes()
            return ["+run=dated", "hydra/job_logging=stdout", f"run_dir={run_dir}"]
    return []


def short_keys(words: Iterable[str]) -> set[str]:
    """Keys without a dot, as in `ocr=0.5`: names of terms, top-level keys or groups."""
    return {match[1] for word in words if (match := _SHORT_WEIGHT.match(word)) is not None}


def may_hold_weights(words: Iterable[str]) -> bool:
    """Whether a word like `ocr=0.5` is among them; it may name something other than a term."""
    return any(_SHORT_NUMBER.match(word) for word in words)


def write_out_weights(words: Iterable[str], terms: Collection[str]) -> list[str]:
    """Rewrite `ocr=0.5` as `reward.terms.ocr.weight=0.5`; other words are unchanged.

    `ocr=null`, which removes a term, becomes `reward.terms.ocr=null`.
    """
    return [
        _write_out(match[1], word[match.end() :])
        if (match := _SHORT_WEIGHT.match(word)) is not None and match[1] in terms
        else word
        for word in words
    ]


def _write_out(term: str, value: str) -> str:
    key = f"reward.terms.{term}"
    return f"{key}=null" if value == "null" else f"{key}.weight={value}"


def primary_folder() -> str:
    """Folder of the config that Hydra composed, while it runs a job."""
    sources = HydraConfig.get().runtime.config_sources
    return next(source.path for source in sources if source.provider == "main")


# `${config_dir:}` in a YAML file: the folder that Hydra searched first, so that prompt files next
# to a config are found from any working directory.
OmegaConf.register_new_resolver("config_dir", primary_folder, replace=True)
