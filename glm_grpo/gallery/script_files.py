"""Values as script files, the one form of data that a page opened from disk may load.

A browser refuses a page at a `file:` address every other way of reading a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_UNSAFE = re.compile("[<\u2028\u2029\ud800-\udfff]")


def to_script(key: str, value: Mapping[str, Any]) -> bytes:
    """A script that hands a value to the page: one call, `glmGallery.receive(key, value)`.

    No text of the value can end the call or a script element: `<` and the two separators that end
    a line of a script, U+2028 and U+2029, are escaped. Halves of surrogate pairs, which have no
    UTF-8 form and which an address refuses, become U+FFFD.

    Args:
        key: Name by which the page asks for the value.
        value: Plain values as JSON has them; numbers finite.

    Raises:
        ValueError: A number is not finite.
    """
    arguments = ", ".join(
        json.dumps(argument, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        for argument in (key, value)
    )
    return f"glmGallery.receive({_UNSAFE.sub(_escape, arguments)});\n".encode()


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return "\ufffd" if "\ud800" <= character <= "\udfff" else f"\\u{ord(character):04x}"
