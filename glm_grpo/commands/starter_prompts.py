"""Natural prompts to begin with: scenes with a text in them, or objects."""

from __future__ import annotations

from itertools import permutations, product
from random import Random

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


# Colours, counts and positions, as in T2I-CompBench (arXiv 2307.06350), with objects of our own.
_OBJECTS = ("cat", "dog", "bicycle", "teapot", "car", "chair", "bird", "guitar")
_COLOURS = ("red", "blue", "green", "yellow", "purple", "black", "white", "pink")
_COUNTED = ("apples", "books", "candles", "balloons", "cups", "boats", "chairs", "birds")
_NUMBERS = ("two", "three", "four", "five")
_PLACES = ("on a wooden table", "in a sunny garden", "on a sandy beach", "in front of a brick wall")
_POSITIONS = ("to the left of", "to the right of", "above", "below")


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


def training_objects() -> list[str]:
    """Return 64 prompts about objects: a quarter each of one, two, several, and beside another."""
    return _object_prompts(0, 16)


def held_out_objects() -> list[str]:
    """Return 16 prompts about objects, in combinations that are not trained on."""
    return _object_prompts(16, 20)


def _object_prompts(start: int, stop: int) -> list[str]:
    """Some prompts of each kind, in an order that is always the same."""
    pairs = [*permutations(_OBJECTS, 2)]
    one = [f"a photo of a {c} {o} {p}" for c, o, p in product(_COLOURS, _OBJECTS, _PLACES)]
    two = [
        f"a {c} {first} and a {d} {second}"
        for (c, d), (first, second) in product(permutations(_COLOURS, 2), pairs)
    ]
    several = [f"a photo of {n} {o} {p}" for n, o, p in product(_NUMBERS, _COUNTED, _PLACES)]
    beside = [
        f"a {first} {where} a {second}" for (first, second), where in product(pairs, _POSITIONS)
    ]
    kinds = [Random(0).sample(prompts, stop)[start:] for prompts in (one, two, several, beside)]
    return [prompt for each in zip(*kinds, strict=True) for prompt in each]
