"""Parse command-line values, and refuse invalid ones before any expensive import.

These are `type`s for argparse; errors name the value, the rule and what to write.
"""

from __future__ import annotations

import math
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path

from glm_grpo.errors import ConfigError
from glm_grpo.plan.devices import DEVICES, KNOWN, Hardware, hardware_with

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_MOST_MEMORY = 10**18

_WHOLE_KEY = re.compile(r"reward\.terms\.(\w+)\.weight")
_TERM = re.compile("[a-z][a-z0-9_]*")


def whole_number(least: int, most: int, *, remedy: str) -> Callable[[str], int]:
    """Make a type for a whole number in a range, including both ends."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise _refusal(text, f"must be a whole number from {least} to {most}; {remedy}")
        return number

    return parse


def memory_size(text: str) -> int:
    """Parse a size such as 24GB into bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, flags=re.IGNORECASE)
    size = 0.0
    if match is not None:
        size = float(match[1]) * _UNITS.get(match[2].upper(), 0)
    if not 1 <= size <= _MOST_MEMORY:
        raise _refusal(
            text,
            f"must be a number and a unit, {_MOST_MEMORY:.0e} bytes at most: B, KB, MB, GB (powers "
            "of 1000) or KiB, MiB, GiB (powers of 1024); for example 24GB",
        )
    return round(size)


def hardware(text: str) -> Hardware:
    """Parse the name of a GPU, such as rtx4090 or 4090, or its memory, such as 16gb."""
    name = re.sub(r"[\s-]", "", text.lower())
    if (device := DEVICES.get(name) or DEVICES.get(f"rtx{name}")) is not None:
        return Hardware([device], device.memory)
    try:
        return hardware_with(memory_size(text))
    except ArgumentTypeError:
        rule = f"must be one of {KNOWN}, or the memory of a GPU, such as 16gb"
        raise _refusal(text, rule) from None


def path(text: str) -> Path:
    """Parse a path; a shell leaves the tilde of `--output=~/mine` and of quoted ones as it is."""
    return Path(os.path.expanduser(text))


def path_or_override(text: str) -> Path | str:
    """Parse a path; a `key=value` that is not the name of a file or folder stays a text."""
    found = path(text)
    return text if "=" in text and not found.exists() else found


def output_png(text: str) -> Path:
    """Parse the path of a PNG that can be written."""
    found = path(text)
    if found.suffix.lower() != ".png":
        raise _refusal(text, "must end in .png, the format that is written")
    if found.is_dir():
        raise _refusal(text, "is a folder; give the name of a file in it")
    _check_writable(text, found.absolute().parent)
    return found


def output_folder(text: str) -> Path:
    """Parse a folder that can be written or created."""
    found = path(text)
    _check_writable(text, found.absolute())
    if (found / "evaluations").is_dir():
        raise _refusal(text, "is the folder of a run; choose another path")
    return found


def _check_writable(text: str, folder: Path) -> None:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise _refusal(text, f"needs a folder that can be written, which {there} is not")


def _refusal(text: str, rule: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"{text!r} {rule}")


def is_weight(text: str) -> bool:
    """Whether a word sets a term's weight, as in `ocr=0.5` or `reward.terms.ocr.weight=0.5`."""
    key, equals, _ = text.partition("=")
    return bool(equals) and _TERM.fullmatch(_term_of(key)) is not None


def _term_of(key: str) -> str:
    match = _WHOLE_KEY.fullmatch(key)
    return key if match is None else match[1]


def parse_fractions(words: Sequence[str], *, option: str) -> list[float]:
    """Parse numbers from 0 to 1 from a command line.

    Args:
        words: Words given with the option.
        option: Name of the option, for errors.
    """
    fractions = []
    for each in words:
        try:
            fraction = float(each)
        except ValueError:
            fraction = math.nan
        if not 0 <= fraction <= 1:
            raise ConfigError(
                f"{option} {each!r}: must be a number from 0 to 1; for example {option} 0 0.5"
            )
        fractions.append(fraction)
    return fractions


def parse_weights(words: Sequence[str], *, option: str) -> dict[str, float]:
    """Parse `TERM=NUMBER` or `reward.terms.TERM.weight=NUMBER` from a command line.

    Args:
        words: Words given with the option.
        option: Name of the option, such as `--weights`, for errors.
    """
    weights: dict[str, float] = {}
    for each in words:
        key, _, text = each.partition("=")
        term = _term_of(key)
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not term or term in weights or not math.isfinite(weight):
            raise ConfigError(
                f"{option} {each!r}: must be TERM=NUMBER with a finite number, each term once; for "
                f"example {option} lpips=0.4 ocr=0.6"
            )
        weights[term] = weight
    return weights
