"""Texts for the terminal: sizes, folders, and characters that would steer it."""

from __future__ import annotations

import os
import re
from pathlib import PurePath

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What moves the cursor, colours, renames a terminal's window, or turns the direction of a line."""

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


def without_folders(path: str) -> str:
    """A hub id as it is; of a path the last part, which says nothing of the machine it was on."""
    is_path = os.path.isabs(path) or os.path.exists(path)
    return PurePath(path).name if is_path else path


def describe_bytes(number: int) -> str:
    """In the largest decimal unit that leaves a digit before the point, with two after it."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"


def printable(text: str) -> str:
    """A text of someone else's for the terminal: characters that steer it are spelt out.

    Line breaks and tabs stay.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
