"""Check that prompt sources exist, before importing the libraries that read them."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from glm_grpo.config import Config
from glm_grpo.errors import DataError

FILE_SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

EMBEDDED = "tiny:"
"""Prefix for the names of the prompt sets that the embedded models were made with."""


def check_prompt_places(config: Config, config_dir: Path | None) -> None:
    """Refuse missing prompt files, without delay.

    Args:
        config_dir: Folder of the config; None for the package's.
    """
    for key, path in (("path", config.data.path), ("eval_path", config.data.eval_path)):
        if path.startswith(EMBEDDED) or may_be_hub_id(path) or Path(path).exists():
            continue
        if config_dir is not None and (config_dir / path).exists():
            raise DataError(
                f"data.{key}: {path}: no such file or folder in {Path.cwd()}, but there is one in "
                f"{config_dir}; write ${{config_dir:}}/{path} in the config there"
            )
        raise DataError(f"data.{key}: {describe_missing(path)}")


def may_be_hub_id(path: str) -> bool:
    """Whether a path that does not exist can be the id of a hub data set."""
    is_path = path.startswith(".") or Path(path).suffix.lower() in FILE_SUFFIXES
    return not is_path and HUB_ID.fullmatch(path) is not None


def describe_missing(path: str) -> str:
    """Describe a missing path: the folder that was searched, and what was probably meant."""
    nearest = nearest_beside(path)
    remedy = (
        f"did you mean {nearest}?"
        if nearest is not None
        else f"give a prompts file ({', '.join(FILE_SUFFIXES)}), a folder, or a hub data set as "
        "owner/name"
    )
    return f"{path}: no such file or folder in {Path(path).absolute().parent}; {remedy}"


def nearest_beside(path: str) -> Path | None:
    """The file or folder, in the folder of a missing one, whose name is similar; None if none."""
    place = Path(path).absolute()
    names = os.listdir(place.parent) if place.parent.is_dir() else []
    nearest = difflib.get_close_matches(place.name, names, n=1)
    return Path(path).with_name(nearest[0]) if nearest else None
