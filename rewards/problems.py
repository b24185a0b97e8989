"""Describe the problems of a config, one per key: the value, the rule it breaks, the remedy."""

from __future__ import annotations

import difflib
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rewards.base import TermConfig
from rewards.config import RewardConfig
from rewards.options import HIDDEN, RELATION
from rewards.terms import KINDS
from rewards.terms.ocr import OCR_ENGINES, OcrConfig

NOT_GIVEN = "(not given)"

_MOST_NAMED = 3
"""Largest number of keys of one name that a remedy lists; every term has a weight, for instance."""

_MOST_SHOWN = 15
"""Largest number of problems, and of list items in a remedy; every item can be a problem."""

_LONGEST_SHOWN = 400
"""Characters of a refused value, and of a remedy that repeats it, so that a file pasted as a name
does not hide the rule."""

_WHOLE_NUMBER = "must be a whole number"
_TYPE_RULES = {
    "int_type": _WHOLE_NUMBER,
    "int_from_float": _WHOLE_NUMBER,
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a section with its own keys",
    "model_type": "must be a section with its own keys",
    "model_attributes_type": "must be a section with its own keys",
}
_BOUND_RULES = {
    "greater_than": ("gt", "must be greater than {}", "more than {}"),
    "greater_than_equal": ("ge", "must be at least {}", "{} or more"),
    "less_than": ("lt", "must be less than {}", "less than {}"),
    "less_than_equal": ("le", "must be at most {}", "{} or less"),
    # The remedy names the nearest two.
    "multiple_of": ("multiple_of", "must be a multiple of {}", ""),
}


@dataclass(frozen=True)
class Problem:
    """One refused key.

    Attributes:
        key: Dotted, as on the command line.
        value: The given value.
        rule: What the value must be.
        remedy: What to write instead.
    """

    key: str
    value: object
    rule: str
    remedy: str


def describe_problems(problems: Sequence[Problem]) -> str:
    """Format problems for people: a heading, then key and value, rule and remedy of each."""
    heading = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"The config has {heading}:"]
    for problem in problems[:_MOST_SHOWN]:
        value = NOT_GIVEN if problem.value is NOT_GIVEN else f"= {_show(problem)}"
        lines += [
            f"  {problem.key} {value}",
            f"    rule:   {problem.rule}",
            f"    remedy: {problem.remedy}",
        ]
    if len(problems) > _MOST_SHOWN:
        lines.append(f"  and {len(problems) - _MOST_SHOWN} more")
    return "\n".join(lines)


def _show(problem: Problem) -> str:
    value = problem.value
    # Do not repeat secrets such as `api_key=...`, which belong in the environment.
    if isinstance(value, str) and re.search("key|token|secret|password", problem.key):
        value = HIDDEN
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def find_problems(error: ValidationError, model: type[BaseModel], values: object) -> list[Problem]:
    """Translate pydantic's errors into problems, in the order of the keys.

    Args:
        error: Error raised by pydantic.
        model: Model that was validated against.
        values: Values that were validated.
    """
    fields = dict(_walk_fields(model))
    errors = error.errors(include_url=False)
    return [_find_problem(details, errors, fields, values) for details in errors]


def known_keys(model: type[BaseModel]) -> list[str]:
    """All dotted keys of `model`, both sections and options."""
    return list(dict(_walk_fields(model)))


def suggest_value(key: str, model: type[BaseModel]) -> str:
    """The remedy for a key of `model` that is not given."""
    return _suggest(key, dict(_walk_fields(model)))


def unknown_key_problem(key: str, value: object, keys: Sequence[str]) -> Problem:
    """Refuse a key that is not among `keys`, and name the one that was probably meant."""
    parent = key.rpartition(".")[0]
    siblings = [known for known in keys if known.rpartition(".")[0] == parent]
    meant = nearest_keys(key, keys)
    if meant:
        remedy = f"did you mean {' or '.join(meant)}?"
    elif siblings:
        names = ", ".join(known.rpartition(".")[2] for known in siblings)
        remedy = f"use one of {names}, or remove it"
    else:
        remedy = f"remove it; {parent} has no keys" if parent else "remove it"
    return Problem(key, value, f"is not a key of {parent or 'the config'}", remedy)


def nearest_keys(key: str, keys: Sequence[str]) -> list[str]:
    """Known keys that `key` probably means, at most `_MOST_NAMED`; empty if none is near."""
    if key in keys:
        return [key]
    parent, _, name = key.rpartition(".")
    sections = {known.rpartition(".")[0] for known in keys}
    siblings, named = {}, defaultdict(list)
    for known in keys:
        section, _, option = known.rpartition(".")
        if section == parent:
            siblings[option] = [known]
        if known not in sections:
            named[option].append(known)
    # The right name in the wrong section (`learning_rate` for `optim.learning_rate`), split at the
    # wrong place (`eval.every` for `train.eval_every`), or by its initials (`lr`).
    for option in [*named]:
        initials = "".join(word[:1] for word in option.split("_"))
        if option in (name, key.replace(".", "_")) or initials == name:
            return difflib.get_close_matches(key, named[option], n=_MOST_NAMED, cutoff=0.0)
    for options, cutoff in ((siblings, 0.75), (named, 0.75), (siblings, 0.5)):
        for option in difflib.get_close_matches(name, options, n=1, cutoff=cutoff):
            return difflib.get_close_matches(key, options[option], n=_MOST_NAMED, cutoff=0.0)
    return []


def _walk_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field
        if model is RewardConfig and name == "terms":
            # A mapping of sections: list every kind under its own name.
            for kind, term in KINDS.items():
                forms = OCR_ENGINES.values() if term is OcrConfig else [term]
                for form in forms:
                    yield from _walk_fields(form, f"{key}.{kind}.")
        for section in _sections_in(field.annotation):
            yield from _walk_fields(section, f"{key}.")


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for argument in get_args(annotation):
            yield from _sections_in(argument)


def _find_problem(
    details: ErrorDetails,
    errors: Sequence[ErrorDetails],
    fields: Mapping[str, FieldInfo],
    values: object,
) -> Problem:
    is_item = bool(details["loc"]) and isinstance(details["loc"][-1], int)
    if not is_item or details["type"] == "invalid_key":
        return _translate(details, fields)
    items: Any = values
    *place, _ = details["loc"]
    for part in place:
        items = items[part]
    refused = {int(each["loc"][-1]): each for each in errors if [*each["loc"][:-1]] == place}
    # A set, which YAML can contain, has no order.
    return _item_problem(details, refused, fields, [*items])


def _translate(details: ErrorDetails, fields: Mapping[str, FieldInfo]) -> Problem:
    key = ".".join(str(part) for part in details["loc"])
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == RELATION:
        return Problem(key, value, str(context["rule"]), str(context["remedy"]))
    if kind == "invalid_key":
        return Problem(key, value, "is not a key of the config: keys are text", "remove it")
    if kind == "extra_forbidden":
        return unknown_key_problem(key, value, list(fields))
    purpose = _purpose(key, fields)
    if kind == "missing":
        return Problem(key, NOT_GIVEN, f"is required.{purpose}", _suggest(key, fields))
    if kind in _BOUND_RULES:
        name, rule, remedy = _BOUND_RULES[kind]
        limit = context[name]
        bound = str(limit) if isinstance(limit, int) else f"{limit:g}"
        if kind == "multiple_of":
            below = value // limit * limit
            nearest = sorted({max(each, limit) for each in (below, below + limit)})
            remedy = " or ".join(map(str, nearest))
        return Problem(
            key, value, f"{rule.format(bound)}.{purpose}", f"set {key} to {remedy.format(bound)}"
        )
    if kind == "literal_error":
        return _choice_problem(key, value, _choices(details))
    if kind in _TYPE_RULES:
        remedy = _type_remedy(key, kind, value, fields)
        return Problem(key, value, f"{_TYPE_RULES[kind]}.{purpose}", remedy)
    return Problem(key, value, f"{details['msg']}.{purpose}", f"correct {key}")


def _item_problem(
    details: ErrorDetails,
    refused: Mapping[int, ErrorDetails],
    fields: Mapping[str, FieldInfo],
    items: Sequence[object],
) -> Problem:
    """Refuse an item of a list; the remedy gives the whole list, in the form to type."""
    *place, last = details["loc"]
    key, index = ".".join(map(str, place)), int(last)
    whole = _write_list(key, items, refused)
    is_readable = len(items) <= _MOST_SHOWN and len(whole) <= _LONGEST_SHOWN
    # For a missing item, the input is the list.
    value = NOT_GIVEN if details["type"] == "missing" else details["input"]
    rule = _translate(details, fields).rule
    return Problem(f"{key}[{index}]", value, rule, whole if is_readable else "correct it")


def _write_list(key: str, items: Sequence[object], refused: Mapping[int, ErrorDetails]) -> str:
    """How to write a list of which items were refused."""
    if any(each["type"] == "string_type" and _is_plain(each["input"]) for each in refused.values()):
        quoted = ",".join(f'"{_as_text(item)}"' if _is_plain(item) else "..." for item in items)
        return f"write text in quotation marks: {shlex.quote(f'{key}=[{quoted}]')}"
    written: list[str] = []
    choices: list[str] = []
    for index in range(max(len(items), *(each + 1 for each in refused))):
        if index not in refused:
            written.append(str(items[index]))
        elif refused[index]["type"] == "literal_error":
            choices = _choices(refused[index])
            written += _nearest(items[index], choices)
        else:
            written.append("...")
    if choices:
        # A word without a near match leaves nothing; no choice is suggested twice.
        written = [*dict.fromkeys(written)] or choices[:1]
    return f"write {key}=[{','.join(written)}]"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _as_text(value: object) -> str:
    """The word that YAML or Hydra probably read as this value, escaped for quotation marks."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "null" if value is None else str(value).replace('"', '\\"')


def _choice_problem(key: str, value: object, choices: Sequence[str]) -> Problem:
    nearest = _nearest(value, choices)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"set {key}={choices[0]}"
    return Problem(key, value, f"must be one of {', '.join(choices)}", remedy)


def _choices(details: ErrorDetails) -> list[str]:
    expected = str(details["ctx"]["expected"])
    return expected.replace("'", "").replace(" or ", ", ").split(", ")


def _nearest(value: object, choices: Sequence[str]) -> list[str]:
    # No number is similar to a word.
    return difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []


def _type_remedy(key: str, kind: str, value: object, fields: Mapping[str, FieldInfo]) -> str:
    is_whole = _TYPE_RULES[kind] == _WHOLE_NUMBER
    if is_whole or kind in ("float_type", "finite_number"):
        number = "a whole number" if is_whole else "a number"
        example = _example_number(value, fields.get(key), is_whole=is_whole)
        quoted = " without quotation marks" if example == value else ""
        return f"write {number}{quoted}, such as {key}={example}"
    if kind == "bool_type":
        return f"write {key}=true or {key}=false, without quotation marks"
    if kind in ("tuple_type", "list_type"):
        item = value if isinstance(value, str) and value.isidentifier() else "..."
        return f"write a list: '{key}=[{item}]'"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "string_type" and (
        is_number or (isinstance(value, bool) and not _example(key, fields))
    ):
        return f"write it as text, on the command line '{key}=\"{_as_text(value)}\"'"
    if kind == "string_type" and isinstance(value, list) and value and isinstance(value[0], str):
        return f"give one value, such as {key}={value[0]}"
    return _suggest(key, fields)


def _suggest(key: str, fields: Mapping[str, FieldInfo]) -> str:
    options = [known for known in fields if known.startswith(f"{key}.")]
    if options:
        return f"set its keys, such as {options[0]}={_example(options[0], fields) or '...'}"
    example = _example(key, fields)
    return f"write, for example, {key}={example}" if example else f"write {key}=..."


def _example(key: str, fields: Mapping[str, FieldInfo]) -> str | None:
    """A value to show: the field's own example or default, else any of its type."""
    # A term may have any name; all have these options.
    field = fields.get(key) or TermConfig.model_fields.get(key.rpartition(".")[2])
    if field is None:
        return None
    if field.annotation in (int, float):
        return _example_number(None, field, is_whole=field.annotation is int)
    if field.annotation is bool:
        return "true"
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    own = (*(field.examples or ()), field.default, *choices)
    return next((each for each in own if isinstance(each, str)), None)


def _example_number(value: object, field: FieldInfo | None, *, is_whole: bool) -> str:
    """A number to show: that with which the value begins, else the field's own, else any."""
    begun = re.match(r"\d+(\.\d+)?(e[+-]?\d{1,2})?(?![\d.])", str(value))
    if begun is not None and float(begun[0]) > 0:
        return str(round(float(begun[0]))) if is_whole else begun[0]
    for own in [] if field is None else [*(field.examples or ()), field.default]:
        if isinstance(own, int | float):
            return f"{own:g}"
    return "8" if is_whole else "0.5"


def _purpose(key: str, fields: Mapping[str, FieldInfo]) -> str:
    if key not in fields or fields[key].description is None:
        return ""
    return " " + " ".join(str(fields[key].description).split())
