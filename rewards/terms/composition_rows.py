"""Read from a prompt's row which objects its images should show, in the form of GenEval.

    {"tag": "counting", "prompt": "a photo of three pizzas",
     "include": [{"class": "pizza", "count": 3}], "exclude": [{"class": "pizza", "count": 4}]}

Source: `prompts/evaluation_metadata.jsonl` of djghosh13/geneval; 2310.11513.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Relation = Literal["left of", "right of", "above", "below"]

RELATIONS: tuple[Relation, ...] = get_args(Relation)

COLOURS = (
    *("red", "orange", "yellow", "green", "blue"),
    *("purple", "pink", "brown", "black", "white"),
)
"""Colours between which the rule chooses."""

COUNTING = "counting"
"""Tag of prompts with another threshold."""
TAGS = ("single_object", "two_object", COUNTING, "colors", "position", "color_attr")
"""Tags of the published prompts. Rows may have others."""

_KEYS_OF_INCLUDE = ("class", "count", "color", "position")
_KEYS_OF_EXCLUDE = ("class", "count")


class CompositionError(ValueError):
    """A row does not say in the form of GenEval what its images should show."""


@dataclass(frozen=True)
class Condition:
    """Objects of one class that an image should have, or should not.

    Attributes:
        label: Their class.
        count: Number of objects, at least 1.
        colour: Colour of each of them, one of `COLOURS`; None: any.
        relation: Where each of them is, seen from the objects of `other`; None: anywhere.
        other: Index of another condition in `Composition.include`; None without a relation.
    """

    label: str
    count: int
    colour: str | None = None
    relation: Relation | None = None
    other: int | None = None


@dataclass(frozen=True)
class Composition:
    """What the images of a prompt should show.

    Attributes:
        include: Conditions that must all hold; at least one.
        exclude: Numbers of objects that an image must stay below.
        tag: Kind of prompt, such as `counting`; empty if the row has none.
    """

    include: tuple[Condition, ...]
    exclude: tuple[Condition, ...] = ()
    tag: str = ""

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes that a detector must know, each once."""
        return tuple(dict.fromkeys(each.label for each in (*self.include, *self.exclude)))

    def describe(self) -> tuple[str, ...]:
        """What is asked for, such as `2 red car`, `dog left of car` and `no cat`.

        An `exclude` that only makes a number exact is left out.
        """
        asked = []
        for each in self.include:
            seen_from: tuple[str, ...] = ()
            if each.relation is not None and each.other is not None:
                seen_from = (each.relation, self.include[each.other].label)
            asked.append(in_words(each.count, each.colour, each.label, *seen_from))
        numbers = {(each.label, each.count + 1) for each in self.include}
        for each in self.exclude:
            if (each.label, each.count) not in numbers:
                fewer = f"fewer than {each.count}" if each.count > 1 else "no"
                asked.append(f"{fewer} {each.label}")
        return tuple(asked)


def in_words(number: int, *words: str | None) -> str:
    """Objects in words, such as `2 red car`; words that are None or empty are left out."""
    count = {0: "no", 1: None}.get(number, str(number))
    return " ".join(filter(None, (count, *words)))


def read_composition(metadata: Mapping[str, object]) -> Composition | None:
    """Read a row's `include`, `exclude` and `tag`; its other keys are left alone.

    A value of None counts as absent, because tables fill missing keys with it.

    Returns:
        None if the row asks for no objects: it has neither `include` nor `exclude`.

    Raises:
        CompositionError: They are not in the form of GenEval, or no image could meet them.
    """
    include, exclude, tag = (metadata.get(key) for key in ("include", "exclude", "tag"))
    if include is None and exclude is None:
        return None
    wanted = _read_conditions("include", include, _KEYS_OF_INCLUDE)
    if not wanted:
        raise CompositionError(
            "include has no condition, so that an empty image would be right; name at least one "
            'class, such as [{"class": "dog", "count": 1}]'
        )
    if tag is not None and not isinstance(tag, str):
        raise CompositionError(f"tag = {tag!r:.100} must be a text, such as counting")
    if tag is not None and tag != COUNTING and tag.strip().casefold() == COUNTING:
        raise CompositionError(
            f"tag = {tag!r} is not {COUNTING}, the tag of prompts whose objects count only above "
            "composition.counting_threshold; write it in lower case and without spaces"
        )
    for index, condition in enumerate(wanted):
        _check_other(f"include[{index}]", index, condition, wanted)
    unwanted = _read_conditions("exclude", exclude, _KEYS_OF_EXCLUDE)
    composition = Composition(wanted, unwanted, tag or "")
    _check_possible(composition)
    return composition


def published_tag(tag: str) -> str | None:
    """The published tag that is probably meant by another one; None if it is one, or like none."""
    if tag in TAGS:
        return None
    return _nearest(tag, TAGS)


def _read_conditions(name: str, rows: object, keys: Sequence[str]) -> tuple[Condition, ...]:
    if rows is None:
        return ()
    if not isinstance(rows, list | tuple):
        raise CompositionError(
            f"{name} = {rows!r:.100} must be a list of conditions, such as "
            '[{"class": "dog", "count": 1}]'
        )
    return tuple(_read_condition(f"{name}[{i}]", row, keys) for i, row in enumerate(rows))


def _read_condition(where: str, row: object, keys: Sequence[str]) -> Condition:
    if not isinstance(row, Mapping):
        raise CompositionError(
            f'{where} = {row!r:.100} must be a condition, such as {{"class": "dog", "count": 1}}'
        )
    given = {key: value for key, value in row.items() if value is not None}
    for key in given:
        if key not in keys:
            # An `exclude` of the published rule ignores colours and positions without a word.
            raise CompositionError(
                f"{where} has the key {key!r}; its keys are {', '.join(keys)}{_meant(key, keys)}"
            )
    label, count = given.get("class"), given.get("count")
    if not isinstance(label, str) or not label or label != label.strip():
        raise CompositionError(
            f"{where}: class {_shown(label)}; it must be the name of a class of the detector, "
            "without spaces around it"
        )
    # JSON's true is an int in Python.
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise CompositionError(
            f"{where}: count {_shown(count)}; it must be a whole number of at least 1"
        )
    relation, other = _read_position(where, given.get("position"))
    return Condition(label, count, _read_colour(where, given.get("color")), relation, other)


def _read_colour(where: str, colour: object) -> str | None:
    if colour is None or (isinstance(colour, str) and colour in COLOURS):
        return colour
    raise CompositionError(
        f"{where}: color {_shown(colour)}; it must be one of {', '.join(COLOURS)}"
        f"{_meant(colour, COLOURS)}"
    )


def _read_position(where: str, position: object) -> tuple[Relation | None, int | None]:
    if position is None:
        return None, None
    match position:
        case [name, int() as other] if not isinstance(other, bool):
            for relation in RELATIONS:
                if name == relation:
                    return relation, other
            raise CompositionError(
                f"{where}: position names the relation {name!r}; it must be one of "
                f"{', '.join(RELATIONS)}{_meant(name, RELATIONS)}"
            )
    raise CompositionError(
        f"{where}: position {_shown(position)}; it must be a relation and the index of another "
        'condition of include, such as ["left of", 0]'
    )


def _check_other(
    where: str, index: int, condition: Condition, include: Sequence[Condition]
) -> None:
    other = condition.other
    if other is None:
        return
    if other == index:
        raise CompositionError(
            f"{where}: position names the condition itself, index {other}; name another one"
        )
    if not 0 <= other < len(include):
        raise CompositionError(
            f"{where}: position names condition {other}; include has the conditions 0 to "
            f"{len(include) - 1}"
        )
    if include[other].label == condition.label:
        raise CompositionError(
            f"{where}: position compares {condition.label} with {condition.label}; no image can "
            "be right, because the rule compares the best object with itself: use two classes"
        )


def _check_possible(composition: Composition) -> None:
    """Refuse conditions on one class that contradict each other: all see the same best objects."""
    for one, two in itertools.combinations(composition.include, 2):
        if one.label == two.label and one.colour and two.colour and one.colour != two.colour:
            raise CompositionError(
                f"include asks for {one.label} in {one.colour} and in {two.colour}; no image can "
                "be right, because the rule looks at the same best objects for both: use two "
                "classes, or leave out the colours"
            )
    for one, two in itertools.product(composition.include, composition.exclude):
        if one.label == two.label and one.count >= two.count:
            raise CompositionError(
                f"include asks for at least {one.count} {one.label}, and exclude for fewer than "
                f"{two.count}; no image can be right: for exactly {one.count}, exclude "
                f"{one.count + 1}"
            )


def _meant(value: object, choices: Iterable[str]) -> str:
    near = _nearest(value, choices) if isinstance(value, str) else None
    return "" if near is None else f": did you mean {near}?"


def _nearest(word: str, choices: Iterable[str]) -> str | None:
    # Stricter than the default, by which grey is near to green, and object to two_object.
    near = difflib.get_close_matches(word.strip().casefold(), choices, n=1, cutoff=0.76)
    return near[0] if near else None


def _shown(value: object) -> str:
    return "is missing" if value is None else f"= {value!r:.100}"
