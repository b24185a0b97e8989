"""Places that prompts are read from, looked at before the libraries that read them are imported."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from glm_grpo.config import TINY, Config
from glm_grpo.errors import DataError

FILE_SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

EMBEDDED = f"{TINY}:"
"""In front of the name of a set of prompts that the embedded model was made with."""


def check_prompt_places(config: Config, config_dir: Path | None) -> None:
    """Refuse prompt files that do not exist, in no time.

    What is there may still be refused when it is read.

    Args:
        config_dir: The folder of the config; None for that of the package.

    Raises:
        DataError: There is nothing where `data.path` or `data.eval_path` says.
    """
    for key, path in (("path", config.data.path), ("eval_path", config.data.eval_path)):
        if path.startswith(EMBEDDED) or may_be_hub_id(path) or _exists(path):
            continue
        if config_dir is not None and _exists(str(config_dir / path)):
            raise DataError(
                f"data.{key}: {path}: no such file or folder in {Path.cwd()}, but in {config_dir}; "
                f"write ${{config_dir:}}/{path} in the config there"
            )
        raise DataError(f"data.{key}: {describe_missing(path)}")


def may_be_hub_id(path: str) -> bool:
    """Whether a path where nothing is can name a data set on the hub."""
    return Path(path).suffix.lower() not in FILE_SUFFIXES and HUB_ID.fullmatch(path) is not None


def describe_missing(path: str) -> str:
    """What to say of a path where nothing is: the folder looked in, and what was meant."""
    place = Path(path).absolute()
    try:
        names = os.listdir(place.parent)
    except (OSError, ValueError):
        names = []
    nearest = difflib.get_close_matches(place.name, names, n=1)
    remedy = (
        f"did you mean {Path(path).with_name(nearest[0])}?"
        if nearest
        else f"give a prompts file ({', '.join(FILE_SUFFIXES)}), a folder, or a hub data set as "
        "owner/name"
    )
    return f"{path}: no such file or folder in {place.parent}; {remedy}"


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:
        # Too long, or in a folder that may not be read: that is told where it is read.
        return True
