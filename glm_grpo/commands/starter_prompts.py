"""Natural prompts to begin with: scenes with a text in them, or objects."""

from __future__ import annotations

from itertools import permutations, product
from random import Random
from typing import Any

_SCENES = (
    'A hand-painted wooden sign that reads "{}" above a bakery door, morning light, photograph',
    'A minimalist concert poster, deep blue background, with the title "{}" in white letters',
    'A cinema marquee at night that shows "{}" in glowing letters, wet street, photograph',
    'A chalkboard outside a café with the words "{}" in white chalk, shallow depth of field',
    'A travel poster of a mountain lake in flat colours with "{}" across the top',
    'A paperback cover with a red fox in the snow and the title "{}" in gold letters',
    'A neon sign that says "{}" on a brick wall, cinematic photograph',
    'A birthday card with watercolour flowers and the words "{}" in brush script',
    'A white mug on a desk with "{}" printed on it in black, soft window light',
    'A street banner between two old houses that reads "{}", bright summer day, photograph',
    'A vintage enamel plate with "{}" in cream letters on dark green, slightly rusty',
    'A food package for oat biscuits, front view, with "{}" in large friendly letters',
    'A museum poster with a marble statue on a grey background and the heading "{}"',
    'A shop window with "{}" in gold leaf on the glass, reflections of the street',
    'A cartoon robot holding up a cardboard sign that says "{}", plain yellow background',
    'A page of a magazine with a photograph of a bicycle and the headline "{}"',
)

_TRAINING_TEXTS = (
    "Open Daily",
    "Fresh Bread",
    "Grand Opening",
    "Welcome Home",
    "Summer Sale",
    "Good Morning",
    "Night Market",
    "Thank You",
    "Sold Out",
    "River Festival",
    "Coffee and Cake",
    "Lost in the Forest",
    "Since 1924",
    "Happy New Year",
    "Follow the Light",
    "Closed on Mondays",
    "Made with Love",
    "Three Days of Jazz",
    "Winter Collection",
    "Please Ring the Bell",
    "The Last Train North",
    "Handmade in Small Batches",
    "Free Entry Before Noon",
    "A Walk Along the Coast",
    "Everything Must Go by Friday",
    "The Quiet Art of Baking Bread",
    "Learn Something New Every Day",
    "Twelve Stories About the Sea",
    "Fresh Fruit and Vegetables Every Morning",
    "Better Together Than Apart",
    "Live Music Every Thursday at Eight",
    "The Garden Is Open From April to October",
)

_HELD_OUT_TEXTS = (
    "Warm Bread",
    "Autumn Concert",
    "Silent City",
    "Soup of the Day",
    "Visit the North",
    "Snow on the Hills",
    "Open Late",
    "Happy Birthday Dear Friend",
    "Monday Again",
    "Harvest Fair on Sunday",
    "Platform 7",
    "Crisp and Golden Since 1987",
    "A Thousand Years of Stone",
    "Fine Watches and Clocks Repaired",
    "Ready to Help",
    "The Best Way to Cross a City",
)


# Colours, counts and positions, as in GenEval (arXiv 2310.11513), of classes of COCO.
_OBJECTS = ("cat", "dog", "bicycle", "cup", "car", "chair", "bird", "umbrella")
_COLOURS = ("red", "blue", "green", "yellow", "purple", "black", "white", "pink")
_COUNTED = ("apple", "book", "bottle", "clock", "cup", "boat", "chair", "bird")
_NUMBERS = {"two": 2, "three": 3, "four": 4}
_PLACES = ("on a wooden table", "in a sunny garden", "on a sandy beach", "in front of a brick wall")
_POSITIONS = {
    "to the left of": "left of",
    "to the right of": "right of",
    "above": "above",
    "below": "below",
}
"""How a prompt says it, and GenEval's name."""


def training_texts() -> list[str]:
    """Return 64 prompts with a text: each scene with four texts, each text in two scenes."""
    return [
        scene.format(_TRAINING_TEXTS[(4 * row + column) % len(_TRAINING_TEXTS)])
        for row, scene in enumerate(_SCENES)
        for column in range(4)
    ]


def held_out_texts() -> list[str]:
    """Return 16 prompts with a text: each scene with one that is not trained on."""
    return [scene.format(text) for scene, text in zip(_SCENES, _HELD_OUT_TEXTS, strict=True)]


def training_objects() -> list[dict[str, Any]]:
    """Return 64 rows about objects: a quarter each of one, two, several, and beside another.

    They say in GenEval's form what an image should show.
    """
    return _object_rows(0, 16)


def held_out_objects() -> list[dict[str, Any]]:
    """Return 16 rows about objects, in combinations that are not trained on."""
    return _object_rows(16, 20)


def _object_rows(start: int, stop: int) -> list[dict[str, Any]]:
    """Some rows of each kind, in an order that is always the same."""
    pairs = [*permutations(_OBJECTS, 2)]
    kinds: list[list[dict[str, Any]]] = [
        [_one(*each) for each in product(_COLOURS, _OBJECTS, _PLACES)],
        [_two(*each) for each in product(permutations(_COLOURS, 2), pairs)],
        [_several(*each) for each in product(_NUMBERS, _COUNTED, _PLACES)],
        [_beside(*each) for each in product(pairs, _POSITIONS)],
    ]
    drawn = [Random(0).sample(rows, stop)[start:] for rows in kinds]
    return [row for each in zip(*drawn, strict=True) for row in each]


def _one(colour: str, name: str, place: str) -> dict[str, Any]:
    prompt = f"a photo of a {colour} {name} {place}"
    return _row(prompt, "colors", [_object(name, color=colour)])


def _two(colours: tuple[str, str], names: tuple[str, str]) -> dict[str, Any]:
    objects = [_object(name, color=colour) for colour, name in zip(colours, names, strict=True)]
    first, second = (f"a {colour} {name}" for colour, name in zip(colours, names, strict=True))
    return _row(f"{first} and {second}", "color_attr", objects)


def _several(number: str, name: str, place: str) -> dict[str, Any]:
    count = _NUMBERS[number]
    row = _row(f"a photo of {number} {name}s {place}", "counting", [_object(name, count=count)])
    # Exactly so many.
    return row | {"exclude": [_object(name, count=count + 1)]}


def _beside(names: tuple[str, str], words: str) -> dict[str, Any]:
    first, second = names
    position = [_POSITIONS[words], 0]
    objects = [_object(second), _object(first, position=position)]
    return _row(f"{_with_article(first)} {words} {_with_article(second)}", "position", objects)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _row(prompt: str, tag: str, include: list[dict[str, Any]]) -> dict[str, Any]:
    return {"prompt": prompt, "tag": tag, "include": include}


def _object(name: str, *, count: int = 1, **wanted: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **wanted}
