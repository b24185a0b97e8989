"""Local files and folders that a config names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glm_grpo.config.load import flatten, set_key
from glm_grpo.config.losses import CustomLoss
from glm_grpo.config.root import Config
from glm_grpo.config.sections import EMBEDDED_MODELS
from rewards.terms.clip_loading import resolve_path
from rewards.user_functions import NamedFunction, find_folder


def local_paths(config: Config) -> dict[str, Path]:
    """Find the existing files and folders that a config names, other than those it writes.

    Names that a library or a hub knows are none. `model.start_from` is always a path, whose
    checkpoint may be gone by now.

    Returns:
        Absolute path by dotted key, such as `data.path` or `reward.terms.aesthetic.head`.
    """
    named = {
        "model.path": None if config.model.path in EMBEDDED_MODELS else config.model.path,
        "data.path": config.data.path,
        "data.eval_path": config.data.eval_path,
    }
    found = {key: Path(text) for key, text in named.items() if text and Path(text).exists()}
    if config.model.start_from is not None:
        found["model.start_from"] = Path(config.model.start_from)
    for name, term in config.reward.terms.items():
        given = {option: getattr(term, option) for option in (*term.files, *term.folders)}
        files = {option: resolve_path(given[option]) for option in term.files if given[option]}
        folders = {option: Path(given[option]) for option in term.folders}
        usable = [each for each in files.items() if each[1].is_file()]
        usable += [each for each in folders.items() if each[1].is_dir()]
        found |= {f"reward.terms.{name}.{option}": path for option, path in usable}
    return {key: path.absolute() for key, path in found.items()}


def users_functions(config: Config) -> dict[str, NamedFunction]:
    """Functions of the user's, by the dotted key of the term, or the loss, that calls them."""
    named = {
        f"reward.terms.{name}": term.users_function() for name, term in config.reward.terms.items()
    }
    if isinstance(config.loss, CustomLoss):
        named["loss"] = NamedFunction("function", config.loss.function, config.loss.folder)
    return {key: function for key, function in named.items() if function is not None}


def with_function_folders(config: Config, places: Sequence[str | Path]) -> Config:
    """State where the user's functions are, so that other processes find them from any folder.

    Args:
        places: Folders to search for a file or module whose folder the config does not state.
    """
    values = config.model_dump(mode="json")
    for key, function in users_functions(config).items():
        given = [] if function.folder is None else [function.folder]
        found = find_folder(function.name, given or places)
        set_key(values, f"{key}.folder", str(found) if found else function.folder)
    return Config.model_validate(values)


def with_absolute_paths(config: Config) -> Config:
    """Make the paths of `local_paths` absolute, so that they name the same files in any folder."""
    values = config.model_dump(mode="json")
    given = flatten(values)
    for key, path in local_paths(config).items():
        # Files in packages keep their names, which mean the same on other machines.
        if "://" not in given[key]:
            set_key(values, key, str(path))
    return Config.model_validate(values)
