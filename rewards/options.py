"""What all sections of the config of rewards share: strictness, and errors with a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
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

from rewards.keys import HIDDEN, find_secret

RELATION = "relation"
"""Type of the errors that carry `rule` and `remedy` in their context."""

_VARIABLE = re.compile("[A-Z][A-Z0-9_]*")


class Options(BaseModel):
    """What all sections share: unknown keys, lax types and non-finite numbers are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_secrets(cls, values: object) -> object:
        return refuse_secrets(values)


def refuse_secrets(values: object) -> object:
    """Hand on what is to be validated; for a validator of mode `before`.

    Args:
        values: Of a section, whose texts are looked at.

    Raises:
        ValidationError: A secret stands in one: the config is stored, logged and shown.
    """
    if isinstance(values, Mapping):
        for name, value in values.items():
            found = find_secret(value) if isinstance(value, str) else None
            if found is not None:
                rule = f"holds {found}, and the config is stored and shown"
                remedy = (
                    "leave the secret in the environment, and name its variable; if it is none, "
                    "rename or unset that environment variable"
                )
                raise problem_at((str(name),), HIDDEN, rule, remedy)
    return values


def problem_at(keys: tuple[str, ...], value: object, rule: str, remedy: str) -> ValidationError:
    """An error about the key that `keys` lead to, to be raised by a validator.

    Args:
        keys: From the section that is being validated.
        value: What was given.
        rule: What the value must be.
        remedy: What to write instead.
    """
    context = {"rule": rule, "remedy": remedy}
    error = PydanticCustomError(RELATION, "{rule}; {remedy}", context)
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
    if "@" in parts.netloc or parts.query or parts.fragment:
        rule = "must be an address alone; user, password or ?key=... would be stored and shown"
        raise problem_at((), HIDDEN, rule, "name the environment variable that holds the key")
    return url


Variable = Annotated[str, AfterValidator(_check_variable)]
"""Name of an environment variable that holds a secret."""

Url = Annotated[str, Field(min_length=1, pattern="^https?://"), AfterValidator(_check_url)]
"""Where a server listens, without secrets in it."""
