"""Base class of all config sections: strict validation, and errors with a remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

HIDDEN = "[hidden]"
"""What errors show instead of a value that may be a secret."""

RELATION = "relation"
"""Type of errors that have `rule` and `remedy` in their context."""

LARGEST_INT = 2**63 - 1
"""Largest whole number: tables and torch use 64 bits."""

LONGEST_WAIT = 1e6
"""Seconds, eleven days; sockets can wait for at most 24 days."""

_FUNCTION = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
_VARIABLE = re.compile("[A-Z][A-Z0-9_]*")

_Value = TypeVar("_Value")
_MAY_CHANGE = "may change on resume"

MayChange = Annotated[_Value, _MAY_CHANGE]
"""Type of an option that leaves what is learned as it is, so that a resumed run may change it."""

# Neither a shell nor YAML expands a tilde after a dotted key.
PathText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""Path of a file or folder, or a name that may be one, such as a hub id."""


class Options(BaseModel):
    """Base of all sections: refuses unknown keys, lax types and non-finite numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        # Our fields may have names such as `model`.
        protected_namespaces=(),
    )

    def __str__(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False).rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def may_change(field: FieldInfo) -> bool:
    """Whether a field is declared as `MayChange`."""
    return _MAY_CHANGE in field.metadata


def changeable_keys(options: Options, prefix: str = "") -> Iterator[str]:
    """Dotted keys of the options that are declared as `MayChange`, those of sections included."""
    for name, field in type(options).model_fields.items():
        key, value = f"{prefix}{field.alias or name}", getattr(options, name)
        if may_change(field):
            yield key
        sections = value if isinstance(value, Mapping) else {"": value}
        for inner, section in sections.items():
            if isinstance(section, Options):
                yield from changeable_keys(section, f"{key}.{inner}." if inner else f"{key}.")


def problem_at(keys: tuple[str, ...], value: object, rule: str, remedy: str) -> ValidationError:
    """Make an error about a key, to be raised by a validator.

    Args:
        keys: Path of the key from the section that is being validated.
    """
    error = PydanticCustomError(RELATION, "{rule}; {remedy}", {"rule": rule, "remedy": remedy})
    details = InitErrorDetails(type=error, loc=keys, input=value)
    return ValidationError.from_exception_data("reward", [details])


def _check_variable(name: str) -> str:
    """Check the name only; an error must not reveal the variable's value."""
    if not _VARIABLE.fullmatch(name):
        rule = "must be the name of an environment variable: capital letters, digits and _"
        raise problem_at((), HIDDEN, rule, "export the key there, and write the variable's name")
    return name


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    # Raises ValueError if the port is not a valid number.
    _ = parts.port
    if "@" in parts.netloc or parts.query or parts.fragment:
        rule = "must be a plain address; a user, password or ?key=... would be stored and shown"
        raise problem_at((), HIDDEN, rule, "name the environment variable that holds the key")
    return url


def _check_function(name: str) -> str:
    module, _, function = name.rpartition(":")
    if not _FUNCTION.fullmatch(name):
        remedy = "write my_folder/my_file.py:my_function"
        raise problem_at(
            (), name, "must be of the form file.py:function or module:function", remedy
        )
    if module in ("glm_grpo", "rewards"):
        rule = f"must name a module or file of yours, and {module} is one of this program's"
        raise problem_at((), name, rule, f"name the file: {module}.py:{function}")
    return os.path.expanduser(name)


FunctionName = Annotated[str, Field(min_length=3, max_length=500), AfterValidator(_check_function)]
"""Name of a function to import, `file.py:function` or `module:function`."""

Variable = Annotated[str, AfterValidator(_check_variable)]
"""Name of an environment variable that holds a secret."""

Url = Annotated[str, Field(min_length=1, pattern="^https?://"), AfterValidator(_check_url)]
"""Address of a server, without secrets in it."""
