"""Base of all sections of the config: strictness, and errors with a remedy."""

from __future__ import annotations

import os
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

HIDDEN = "[hidden]"
"""What errors show in place of a value that may be a key."""

RELATION = "relation"
"""Type of the errors that carry `rule` and `remedy` in their context."""

LARGEST_INT = 2**63 - 1
"""Whole numbers go into tables and to torch, which have 64 bits for them."""

LARGEST_FLOAT, LEAST_FLOAT = 1e12, 1e-30
"""Sizes of numbers: float32 has room for their squares and for sums of those (3e38), and takes none
of them for 0."""

LONGEST_WAIT = 1e6
"""Seconds, eleven days; sockets can wait for 24 at most."""

_LONGEST_TEXT = 100_000
"""Characters."""
_LONGEST_PATH, _LONGEST_NAME = 4095, 255
"""Bytes that Linux takes."""

_VARIABLE = re.compile("[A-Z][A-Z0-9_]*")


class Options(BaseModel):
    """What all sections share: unknown keys, lax types and non-finite numbers are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        # Fields such as `model` are ours to name.
        protected_namespaces=(),
    )

    @model_validator(mode="after")
    def _refuse_unusable(self) -> Options:
        """Refuses values that no computation, table or file can hold."""
        for name, value in self:
            for each in value if isinstance(value, tuple) else (value,):
                found = _unusable(each)
                if found is not None:
                    keys = (type(self).model_fields[name].alias or name,)
                    raise problem_at(keys, value, *found)
        return self


def _unusable(value: object) -> tuple[str, str] | None:
    """The rule that a number or a text breaks, and the remedy."""
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return "must be a whole number of 64 bits", f"set it to {LARGEST_INT} or less"
    if isinstance(value, float) and value and not LEAST_FLOAT <= abs(value) <= LARGEST_FLOAT:
        rule = f"must be 0, or {LEAST_FLOAT:g} to {LARGEST_FLOAT:g} in size: float32 holds no other"
        return rule, "set it to a number in this range"
    if isinstance(value, str) and "\0" in value:
        return "must not hold a null character", "remove it"
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"must have at most {_LONGEST_TEXT} characters", "shorten it"
    return None


def problem_at(keys: tuple[str, ...], value: object, rule: str, remedy: str) -> ValidationError:
    """An error about the key that `keys` lead to, to be raised by a validator.

    Args:
        keys: From the section that is being validated.
        value: What was given.
        rule: What the value must be.
        remedy: What to write instead.
    """
    context = {"rule": _encodable(rule), "remedy": _encodable(remedy)}
    error = PydanticCustomError(RELATION, "{rule}; {remedy}", context)
    details = InitErrorDetails(type=error, loc=tuple(map(_encodable, keys)), input=value)
    return ValidationError.from_exception_data("reward", [details])


def _encodable(text: str) -> str:
    """With halves of surrogate pairs spelt out, which pydantic cannot hold."""
    return text.encode(errors="backslashreplace").decode()


def _check_variable(name: str) -> str:
    """Not what it holds, of which an error would tell everyone."""
    if not _VARIABLE.fullmatch(name):
        rule = "must be the name of an environment variable: capital letters, digits and _"
        raise problem_at((), HIDDEN, rule, "export the key there, and write the variable's name")
    return name


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    # Raises ValueError where it is no number, or none of a port.
    _ = parts.port
    if "@" in parts.netloc or parts.query or parts.fragment:
        rule = "must be an address alone; user, password or ?key=... would be stored and shown"
        raise problem_at((), HIDDEN, rule, "name the environment variable that holds the key")
    return url


def path_problem(path: str) -> str | None:
    """The rule that a path breaks which no file system takes, or that cannot be written down."""
    try:
        content = path.encode()
    except UnicodeEncodeError:
        return "must be UTF-8, for it is stored in files that are; rename the folder or file"
    if b"\0" in content:
        return "must not hold a null character"
    if len(content) > _LONGEST_PATH:
        return f"must have at most {_LONGEST_PATH} bytes"
    if max(map(len, content.split(b"/"))) > _LONGEST_NAME:
        return f"must have at most {_LONGEST_NAME} bytes between two slashes"
    return None


def _check_path(path: str) -> str:
    # A shell leaves the tilde behind a dotted key alone, and so does YAML.
    path = os.path.expanduser(path)
    rule = path_problem(path)
    if rule is not None:
        raise problem_at((), path, rule, "name another folder or file")
    return path


PathText = Annotated[str, Field(min_length=1), AfterValidator(_check_path)]
"""Path of a file or folder, or a name that may be one, such as a hub id."""

Variable = Annotated[str, AfterValidator(_check_variable)]
"""Name of an environment variable that holds a secret."""

Url = Annotated[str, Field(min_length=1, pattern="^https?://"), AfterValidator(_check_url)]
"""Where a server listens, without secrets in it."""
