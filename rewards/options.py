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
)
from pydantic_core import InitErrorDetails, PydanticCustomError

HIDDEN = "[hidden]"
"""What errors show in place of a value that may be a key."""

RELATION = "relation"
"""Type of the errors that carry `rule` and `remedy` in their context."""

LARGEST_INT = 2**63 - 1
"""Whole numbers go into tables and to torch, which have 64 bits for them."""

LONGEST_WAIT = 1e6
"""Seconds, eleven days; sockets can wait for 24 at most."""

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


def problem_at(keys: tuple[str, ...], value: object, rule: str, remedy: str) -> ValidationError:
    """An error about the key that `keys` lead to, to be raised by a validator.

    Args:
        keys: From the section that is being validated.
        value: What was given.
        rule: What the value must be.
        remedy: What to write instead.
    """
    error = PydanticCustomError(RELATION, "{rule}; {remedy}", {"rule": rule, "remedy": remedy})
    details = InitErrorDetails(type=error, loc=keys, input=value)
    return ValidationError.from_exception_data("reward", [details])


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


# A shell leaves the tilde behind a dotted key alone, and so does YAML.
PathText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""Path of a file or folder, or a name that may be one, such as a hub id."""

Variable = Annotated[str, AfterValidator(_check_variable)]
"""Name of an environment variable that holds a secret."""

Url = Annotated[str, Field(min_length=1, pattern="^https?://"), AfterValidator(_check_url)]
"""Where a server listens, without secrets in it."""
