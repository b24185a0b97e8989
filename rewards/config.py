"""The `reward` section of the config: which terms score an image, and their weights.

A term that is absent or null is not used, and its libraries are not imported. A term with weight 0
is scored and shown, but does not affect the reward.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    InstanceOf,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from rewards.base import TermConfig
from rewards.canaries import IMAGE_MEASURES, SOURCE_COPIES, TOKEN_ENTROPY
from rewards.exact import EXACT
from rewards.options import MayChange, Options, problem_at
from rewards.terms import KINDS
from rewards.terms.custom import CustomConfig, ScoringFunction
from rewards.terms.ocr import OCR_ENGINES, OcrConfig
from rewards.types import RewardError
from rewards.user_functions import find_folder, name_function
from rewards.weighting import Mode

_USABLE_NAME = re.compile("[a-z][a-z0-9_]{0,39}")
_SHARES = (exact.name for exact in EXACT.values())
_TAKEN_NAMES = frozenset(
    ("total", *_SHARES, "departures", SOURCE_COPIES, TOKEN_ENTROPY, *IMAGE_MEASURES)
)
"""Names of other metrics that appear beside those of terms, in evaluations and as canaries."""


def _read_terms(value: object) -> object:
    """Determine the kind of every term, drop null ones, and sort them."""
    if not isinstance(value, Mapping):
        return value
    terms = {}
    for name, options in value.items():
        if options is None:
            _refuse_misspelt(str(name), value)
            continue
        if not isinstance(options, Mapping):
            is_number = isinstance(options, int | float) and not isinstance(options, bool)
            weight = options if is_number else 1.0
            raise problem_at(
                (str(name),),
                options,
                "must be a section with its own keys",
                f"write {name}: {{weight: {weight}}}, on the command line {name}={weight}",
            )
        terms[str(name)] = _with_kind(str(name), options)
    places = {kind: place for place, kind in enumerate(KINDS)}
    return dict(sorted(terms.items(), key=lambda item: (places[str(item[1]["kind"])], item[0])))


def _refuse_misspelt(name: str, terms: Mapping[object, object]) -> None:
    """Refuse `lipps: null` beside `lpips`, which would remove nothing."""
    for kind in difflib.get_close_matches(name, KINDS, n=1, cutoff=0.75):
        if name != kind and terms.get(kind) is not None:
            rule = "null removes a term, and there is no kind of term of this name"
            raise problem_at((name,), None, rule, f"did you mean {kind}: null?")


def _with_kind(name: str, options: Mapping[str, object]) -> dict[str, object]:
    if not _USABLE_NAME.fullmatch(name):
        rule = "a term's name consists of lowercase letters, digits and _, at most 40 characters"
        raise problem_at((name,), options, rule, "rename it")
    if name in _TAKEN_NAMES:
        rule = "is the name of another metric of a run, which the term would replace"
        raise problem_at((name,), options, rule, f"rename it, for example {name}_term")
    kind = options.get("kind", name)
    if isinstance(kind, str) and kind in KINDS:
        return {"kind": kind, **options}
    nearest = difflib.get_close_matches(kind, KINDS, n=1) if isinstance(kind, str) else []
    if "kind" in options:
        remedy = (
            f"did you mean {nearest[0]}?"
            if nearest
            else f"set reward.terms.{name}.kind=custom for your own"
        )
        raise problem_at((name, "kind"), kind, f"must be one of {', '.join(KINDS)}", remedy)
    rule = f"{name!r} is not a reward term ({', '.join(KINDS)})"
    remedy = (
        f"did you mean {nearest[0]}?"
        if nearest
        else f"give it a kind: +reward.terms.{name}.kind=custom, or another of these"
    )
    raise problem_at((name,), dict(options), rule, remedy)


def _read_term(value: object) -> object:
    # A discriminated union would do, but pydantic writes the tag into the key of every error: users
    # cannot set the key reward.terms.ocr.rapidocr.threads.
    if not isinstance(value, Mapping):
        return value
    kind = KINDS[str(value["kind"])]
    label = f"kind {value['kind']}"
    if kind is OcrConfig:
        engine = str(value.get("engine"))
        if engine not in OCR_ENGINES:
            rule = f"must be one of {', '.join(OCR_ENGINES)}"
            remedy = "set engine=rapidocr, which needs no download"
            raise problem_at(("engine",), value.get("engine"), rule, remedy)
        kind, label = OCR_ENGINES[engine], f"engine {engine}"
    for name in value:
        if name not in kind.model_fields:
            raise _foreign_option(str(name), value[name], kind, label)
    return kind.model_validate(value)


def _foreign_option(
    name: str, value: object, kind: type[TermConfig], label: str
) -> ValidationError:
    others = [engine for engine, form in OCR_ENGINES.items() if name in form.model_fields]
    nearest = difflib.get_close_matches(name, kind.model_fields, n=1)
    if issubclass(kind, OcrConfig) and others:
        remedy = f"remove it, or set engine={others[0]}"
    elif nearest:
        remedy = f"did you mean {nearest[0]}?"
    else:
        remedy = f"use any of {', '.join(kind.model_fields)}"
    return problem_at((name,), value, f"is not an option of {label}", remedy)


_AnyTerm = Annotated[SerializeAsAny[InstanceOf[TermConfig]], BeforeValidator(_read_term)]


def with_functions(
    reward: Mapping[str, object], functions: Mapping[str, ScoringFunction | None]
) -> dict[str, object]:
    """Add functions to the values of a reward, as custom terms of weight 1.

    Args:
        reward: The section's values.
        functions: By the name of the term. A function replaces a term of its name and keeps the
            weight; None leaves the term out.
    """
    terms = reward.get("terms")
    found = dict(terms) if isinstance(terms, Mapping) else {}
    added: dict[str, object] = {}
    for name, function in functions.items():
        if function is not None:
            named = name_function(function, name)
            folder = find_folder(named, [Path.cwd(), sys.path[0]])
            identity = {"kind": "custom", "function": named, "folder": folder and str(folder)}
            added[name] = {**_options_of_custom(found.get(name)), **identity}
        elif name not in found:
            raise RewardError(
                f"rewards = {{{name!r}: None}}: there is no such term to leave out "
                f"({', '.join(found)})"
            )
    kept = {name: options for name, options in found.items() if name not in functions}
    return {**reward, "terms": {**kept, **added}}


def _options_of_custom(options: object) -> dict[str, object]:
    """The options of a term that a custom one has, too; weight 1 without such a term."""
    if not isinstance(options, Mapping):
        return {"weight": 1.0}
    return {key: value for key, value in options.items() if key in CustomConfig.model_fields}


class RewardConfig(Options):
    """Terms and their weights."""

    combine: Mode = "weighted_sum"
    """`weighted_sum` of the scores, or `normalize_then_sum`: first standardise scores within each
    prompt's group, so that terms with a small spread count as much as terms with a large one.
    Evaluations use the mean and std of the base model instead, so that totals are comparable
    across steps."""
    terms: Annotated[dict[str, _AnyTerm], BeforeValidator(_read_terms)]
    """The terms in use by name; absent or null: not used."""
    allow_image_only: MayChange[bool] = False
    """Allow a reward that uses only the image; the policy can then maximise it with a single image
    for every prompt."""
    overlap: MayChange[bool] = True
    """Score a group while the next one is being decoded."""
    watch: MayChange[Annotated[tuple[str, ...], Field(strict=False)]] = ()
    """Terms with weight 0 that reveal whether the policy games the others; see `on_hacking`."""
    on_hacking: MayChange[Literal["warn", "stop"]] = "warn"
    """When a canary is outside the band of the base model for three steps in a row, or two
    evaluations: warn, or also save and stop."""
    canary_margin: MayChange[float] = Field(default=6.0, gt=0.0)
    """Half the width of a canary's band, in standard errors of a step's mean."""

    def weights(self) -> dict[str, float]:
        """Weight by term name, in the order of the R axis."""
        return {name: term.weight for name, term in self.terms.items()}

    @model_validator(mode="after")
    def _check_terms(self) -> RewardConfig:
        weights = self.weights()
        if not weights:
            rule = "no term is used, so there is no reward"
            raise problem_at(("terms",), {}, rule, f"use any of {', '.join(KINDS)}")
        if not any(weights.values()):
            rule = f"the weights of all terms ({', '.join(weights)}) are 0, so every reward is 0"
            first = next(iter(weights))
            remedy = f"set one of them, for example reward.terms.{first}.weight=1"
            raise problem_at(("terms",), weights, rule, remedy)
        for name, term in self.terms.items():
            if term.when == "evaluation" and weights[name] != 0:
                rule = (
                    "must be 0 when `when` is evaluation: otherwise evaluations would use another "
                    "reward than training"
                )
                remedy = f"set reward.terms.{name}.weight=0, or reward.terms.{name}.when=always"
                raise problem_at(("terms", name, "weight"), weights[name], rule, remedy)
        tied = [name for name, term in self.terms.items() if term.needs() and weights[name] != 0]
        if not tied and not self.allow_image_only:
            weighted = ", ".join(name for name, weight in weights.items() if weight)
            rule = (
                "no term with a weight uses the prompt or its target, only the image "
                f"({weighted}): a single good image would then suit every prompt"
            )
            remedy = "add such a term (ocr, clip_score, lpips), or set reward.allow_image_only=true"
            raise problem_at(("terms",), weights, rule, remedy)
        for name in self.watch:
            watched = self.terms.get(name)
            if watched is None or watched.weight != 0 or watched.when == "evaluation":
                rule = (
                    f"{name[:100]!r} is no term of weight 0 that is scored at every step; a term "
                    "that is trained on cannot be a canary, and one of evaluations is one there"
                )
                remedy = f"set reward.terms.{name[:100]}.weight=0, or leave it out of reward.watch"
                raise problem_at(("watch",), self.watch, rule, remedy)
        return self
