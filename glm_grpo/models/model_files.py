"""Read the files of a model's folder before loading weights; nothing in them is executed."""

from __future__ import annotations

import json
import reprlib
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from glm_grpo.errors import ConfigError, GlmGrpoError, ModelError
from rewards.out_of_memory import is_out_of_memory

FETCH_AGAIN = "fetch the file again (`hf download`)"

_POINTER = b"version https://git-lfs"
_MOST_NAMED = 3
"""Number of parameters that an error lists, of possibly thousands."""


def is_hub_id(path: str) -> bool:
    """Whether a path has the form of a hub id, owner/name."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def find_folder(path: str, fetch: Callable[[], str]) -> Path:
    """Find the folder of a model.

    Args:
        path: A folder, or a hub id.
        fetch: Downloads the hub id's files into the cache and returns their folder.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if not is_hub_id(path):
        raise ConfigError(
            f"model.path is {path!r}: there is no such folder, and a hub id has the form "
            "owner/name; give an existing folder, a hub id such as zai-org/GLM-Image or "
            "deepseek-community/Janus-Pro-1B, or 'tiny'"
        )
    try:
        return Path(fetch())
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model.path is {path!r}: no such folder, and nothing can be fetched from the hub "
            f"({reason}); a hub id needs a network and, once, the model's download "
            f"(`hf download {path}`)"
        ) from error


@contextmanager
def damage_named(place: Path) -> Iterator[None]:
    """Turn any error from reading a model's file into one that names the file.

    Libraries raise all kinds of errors on files with unexpected contents. Out-of-memory errors pass
    through, because they are not the file's fault.

    Args:
        place: File that is read inside, or folder of a part.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, GlmGrpoError) or is_out_of_memory(error):
            raise
        raise ModelError(f"{place}: cannot be used ({_cause(error)}); {FETCH_AGAIN}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    if not path.is_file():
        raise ModelError(f"{path}: no such file; {FETCH_AGAIN}")
    with damage_named(path):
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ModelError(f"{path}: not a JSON object; {FETCH_AGAIN}")
    return values


def check_files(folder: Path) -> None:
    """Refuse incompletely downloaded files in a folder.

    For weights, reads the header, which contains the length of the file.
    """
    for path in sorted(folder.glob("*")):
        if path.suffix not in (".json", ".jinja", ".safetensors"):
            continue
        with damage_named(path):
            with path.open("rb") as opened:
                start = opened.read(len(_POINTER))
            if start == _POINTER:
                raise ModelError(
                    f"{path}: a pointer of git-lfs, not the file itself; fetch the file with "
                    "`git lfs pull` or `hf download`"
                )
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass


def refuse_missing(place: Path, missing: Iterable[str]) -> None:
    """Refuse weights that lack parameters; the library itself reports those of a wrong shape."""
    names = sorted(missing)
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise ModelError(
            f"{place}: its weights lack {', '.join(names[:_MOST_NAMED])}{more}; without them the "
            "model would be partly random: fetch all its files of one revision again "
            "(`hf download`)"
        )


def check_ids(place: Path, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    """Refuse a tokenizer with ids outside the model's embedding.

    Args:
        place: Folder of the tokenizer.
        size: Entries of the embedding.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= size:
        raise ModelError(
            f"{place}: its tokenizer gives {reprlib.repr(token)} the id {largest}, and the model's "
            f"embedding has {size} entries; fetch tokenizer and weights of one revision"
        )


def _cause(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return textwrap.shorten(f"{type(error).__name__}: {lines[0] if lines else 'no reason'}", 300)
