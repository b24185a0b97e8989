"""What all sections of the config of rewards share: strictness, and errors with a remedy."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

RELATION = "relation"
"""Type of the errors that carry `rule` and `remedy` in their context."""


class Options(BaseModel):
    """What all sections share: unknown keys, lax types and non-finite numbers are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


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
