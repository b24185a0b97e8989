"""Format text for the terminal: sizes, paths, and untrusted characters."""

from __future__ import annotations

import os
import re
from pathlib import PurePath

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


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as `1 prompt` and `1,200 prompts`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """Escape control characters in untrusted text for the terminal.

    Line breaks and tabs are kept.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
