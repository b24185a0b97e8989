"""Format text for the terminal: sizes, paths, and untrusted characters; refuse what is no text."""

from __future__ import annotations

import os
import re
import sys
from pathlib import PurePath

from glm_grpo.errors import ConfigError

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that move the cursor, set colours or titles, or change the text direction."""

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


def without_folders(path: str) -> str:
    """Keep a hub id; shorten a path to its last part, which reveals nothing about the machine."""
    is_path = os.path.isabs(path) or os.path.exists(path)
    return PurePath(path).name if is_path else path


def describe_bytes(number: int) -> str:
    """Format bytes in the largest decimal unit with a value of at least 1, with two decimals."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"


def printable(text: str) -> str:
    """Escape control characters in untrusted text for the terminal.

    Line breaks and tabs are kept.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def refuse_undecodable(*texts: str) -> None:
    """Refuse paths and words of the command line that are not UTF-8.

    Tables, pages and the terminal could not name them.

    Raises:
        ConfigError: One is not UTF-8, or Python takes names for another encoding.
    """
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":
        raise ConfigError(
            f"the names of files are read as {encoding} here, because of the locale or of "
            "PYTHONUTF8: they must be read as UTF-8, like prompts and configs; export PYTHONUTF8=1"
        )
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            shown = printable(os.fsencode(text).decode(errors="backslashreplace"))
            raise ConfigError(
                f"'{shown}' is not UTF-8: the names of files and folders, and words of the command "
                "line, must be; rename it, or work in another folder"
            ) from None
