"""Describe the problems of a config, one per key: the value, the rule it breaks, what was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rewards.config import RewardConfig
from rewards.options import HIDDEN, RELATION
from rewards.terms import KINDS
from rewards.terms.ocr import OCR_ENGINES, OcrConfig

NOT_GIVEN = "(not given)"

_MOST_NAMED = 3
"""Largest number of keys of one name that a remedy lists; every term has a weight, for instance."""

_MOST_SHOWN = 15
"""Largest number of problems."""

_LONGEST_SHOWN = 400
"""Characters of a refused value, so that a file pasted as a name does not hide the rule."""


@dataclass(frozen=True)
class Problem:
    """One refused key.

    Attributes:
        key: Dotted, as on the command line.
        remedy: What to write instead; empty if the rule says it.
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
        lines += [f"  {problem.key} {value}", f"    rule:   {problem.rule}"]
        lines += [f"    remedy: {problem.remedy}"] if problem.remedy else []
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


def find_problems(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Translate pydantic's errors into problems, in the order of the keys."""
    fields = dict(walk_fields(model))
    return [_translate(details, fields) for details in error.errors(include_url=False)]


def known_keys(model: type[BaseModel]) -> list[str]:
    """All dotted keys of `model`, both sections and options."""
    return list(dict(walk_fields(model)))


def nearest_keys(key: str, keys: Sequence[str]) -> list[str]:
    """Known keys that `key` probably means, at most `_MOST_NAMED`; empty if none is near."""
    name = key.rpartition(".")[2]
    ends = {known: known.rpartition(".")[2] for known in keys}
    # The right name in the wrong section (`learning_rate` for `optim.learning_rate`), split at the
    # wrong place (`eval.every` for `train.eval_every`), or by its initials (`lr`).
    near = [
        known
        for known, end in ends.items()
        if end in (name, key.replace(".", "_")) or _initials(end) == name
    ]
    near = near or difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    if not near:
        names = difflib.get_close_matches(name, ends.values(), n=1, cutoff=0.75)
        near = [known for known, end in ends.items() if end in names]
    return difflib.get_close_matches(key, near, n=_MOST_NAMED, cutoff=0.0)


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def walk_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted keys of a config with their fields, those of terms as `terms.KIND.KEY`."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field
        if model is RewardConfig and name == "terms":
            # A mapping of sections: list every kind under its own name.
            for kind, term in KINDS.items():
                forms = OCR_ENGINES.values() if term is OcrConfig else [term]
                for form in forms:
                    yield from walk_fields(form, f"{key}.{kind}.")
        for section in _sections_in(field.annotation):
            yield from walk_fields(section, f"{key}.")


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for argument in get_args(annotation):
            yield from _sections_in(argument)


def _translate(details: ErrorDetails, fields: Mapping[str, FieldInfo]) -> Problem:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    key = "".join(parts).removeprefix(".")
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == RELATION:
        return Problem(key, value, str(context["rule"]), str(context["remedy"]))
    if kind == "extra_forbidden":
        return _unknown_key_problem(key, value, list(fields))
    field = fields.get(key)
    purpose = "" if field is None else " ".join((field.description or "").split())
    remedy = f"for example {key}={field.examples[0]}" if field and field.examples else ""
    if kind == "missing":
        value = NOT_GIVEN
    elif kind == "literal_error" and isinstance(value, str):
        choices = re.findall("'(.*?)'", str(context["expected"]))
        nearest = difflib.get_close_matches(value, choices, n=1)
        remedy = f"did you mean {nearest[0]}?" if nearest else ""
    return Problem(key, value, f"{details['msg']}. {purpose}".rstrip(), remedy)


def _unknown_key_problem(key: str, value: object, keys: Sequence[str]) -> Problem:
    section = key.rpartition(".")[0]
    siblings = [known.rpartition(".")[2] for known in keys if known.rpartition(".")[0] == section]
    meant = nearest_keys(key, keys)
    remedy = f"did you mean {' or '.join(meant)}?" if meant else f"use one of {', '.join(siblings)}"
    return Problem(key, value, f"is not a key of {section or 'the config'}", remedy)
