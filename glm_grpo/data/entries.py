"""Check the rows of a prompt file and turn them into prompts with texts and images."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from glm_grpo.data.files import (
    JSON_FIELDS,
    LONGEST_SHOWN,
    READ_FIELDS,
    SOURCE_FIELDS,
    TARGET_FIELDS,
    Row,
    shorten,
)
from glm_grpo.errors import DataError
from glm_grpo.models.base import ReservedTokens
from rewards.images import ImageError, ImageSource, fit_pixels, open_rgb
from rewards.terms.composition_rows import CompositionError, read_composition
from rewards.texts import find_escaped_break, find_escaped_mark, find_quoted_texts

LARGEST_ASPECT = 4
"""Largest aspect ratio of a source image. Source: `smart_resize` in GLM-Image's image processor
(transformers)."""

LONGEST_ID = 100
USABLE_ID = re.compile(rf"[^./\\][^/\\]{{0,{LONGEST_ID - 1}}}")

_HAVE_TEXT = (datetime.date, datetime.time, datetime.timedelta, Decimal)
"""Values of tables that JSON has no word for, and that become texts."""

_LIST_OF_TEXTS = re.compile(r"""\s*\[\s*["'\]]""")
"""Start of a list in a cell; `[SALE]` is a text in brackets."""


def verify_image(source: ImageSource, origin: str) -> tuple[int, int]:
    """Decode an image fully: the header alone does not reveal a damaged file.

    Args:
        origin: The file and line that name it, for the error.

    Returns:
        Width and height as it is shown, pixels.
    """
    return _open(source, origin).size


def refuse_long_source(source: ImageSource, size: tuple[int, int], origin: str) -> None:
    """Refuse a source image that is longer than the model reads.

    Args:
        size: Width and height, from `verify_image`.
        origin: The file and line that name it, for the error.
    """
    width, height = size
    if max(width, height) > LARGEST_ASPECT * min(width, height):
        name = "the embedded source" if isinstance(source, bytes) else f"source {source}"
        raise DataError(
            f"{origin}: {name} is {width} x {height}; the longer side must be at most "
            f"{LARGEST_ASPECT} times the shorter: crop it"
        )


def load_image(
    source: ImageSource, origin: str, *, height: int, width: int
) -> UInt8[Tensor, "3 H W"]:
    """Load an image and fit it to a size in pixels, as RGB, 0..255.

    See `rewards.images.fit_pixels` for cropping, and `open_rgb` for transparency, orientation and
    colour profile.
    """
    return fit_pixels(_open(source, origin), height=height, width=width)


def _open(source: ImageSource, origin: str) -> Image.Image:
    try:
        return open_rgb(source)
    except FileNotFoundError as error:
        raise DataError(
            f"{origin}: image {source!s} does not exist; paths are relative to the folder of the "
            "file that names them"
        ) from error
    except ImageError as error:
        name = "the embedded image" if isinstance(source, bytes) else f"image {source}"
        raise DataError(f"{origin}: {name} {error}") from error


@dataclass(frozen=True, slots=True)
class PromptEntry:
    """One checked prompt, as `Prompt`, whose images are not in memory yet.

    `origin` is its file and line, for errors.
    """

    origin: str
    prompt_id: str
    prompt: str
    texts: tuple[str, ...]
    target: ImageSource | None
    sources: tuple[ImageSource, ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def refuse_reserved(entry: PromptEntry, tokens: ReservedTokens) -> None:
    """Refuse a prompt that contains the text of a special token.

    Such a token would start an image, or announce one that does not exist, in the middle of a
    prompt. Some tokens are refused only in the texts that the model finds. The `text` field never
    reaches a tokenizer of the model.
    """
    rule = tokens.text_rule
    quoted = "" if rule is None else "\n".join(rule.find(entry.prompt))
    for place, text, reserved in (
        ("'prompt'", entry.prompt, tokens.in_prompts),
        ("'prompt' in quotation marks", quoted, tokens.in_texts),
    ):
        if found := [token for token in reserved if token.strip() and token in text]:
            first = min(found, key=lambda token: (text.index(token), -len(token)))
            raise DataError(
                f"{entry.origin}: {place} contains {first!r}, which the model's "
                "tokenizer reads as a special token, not as text; remove it or write it differently"
            )


def make_entry(row: Row, position: int, *, sources: int = 0) -> PromptEntry:
    """Check one row.

    Args:
        position: Position of the row in its file, from 0; used as its name if it has no `id`.
        sources: Number of source images per prompt; at 0 the source fields are not read, since a
            column of that name may contain anything.
    """
    prompt = _read_string(row, "prompt", row.fields.get("prompt")).strip()
    if not prompt:
        nearest = difflib.get_close_matches("prompt", map(str, row.fields), n=1)
        is_misspelled = nearest and "prompt" not in row.fields
        found = f"; rename {shorten(nearest[0])} to 'prompt'" if is_misspelled else ""
        raise DataError(f"{row.origin}: 'prompt' is missing or blank; every row needs one{found}")
    return PromptEntry(
        origin=row.origin,
        prompt_id=_read_id(row, position),
        prompt=prompt,
        texts=_read_texts(row, prompt),
        target=_read_target(row),
        sources=_read_sources(row, sources),
        metadata=_read_metadata(row),
    )


def _read_string(row: Row, field: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{row.origin}: {field!r} is {shorten(value)}; it must be text")
    _refuse_surrogate(row, field, value)
    if found := find_escaped_mark(value):
        raise DataError(
            f"{row.origin}: {field!r} contains {found:.{LONGEST_SHOWN}}; only JSON escapes "
            "quotation marks, and only once: remove the backslashes"
        )
    if found := find_escaped_break(value):
        raise DataError(
            f"{row.origin}: {field!r} contains {found:.{LONGEST_SHOWN}}, with a backslash and an "
            "n; write a space instead: a text may run over several lines of the image"
        )
    return value


def _refuse_surrogate(row: Row, field: str, value: str) -> None:
    """Refuse what neither a tokenizer nor a file can take; JSON is the only format with it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row.origin}: {field!r} contains {value[error.start]!r}, half of a surrogate pair; "
            "write the whole character, or remove it"
        ) from error


def _read_texts(row: Row, prompt: str) -> tuple[str, ...]:
    value = row.fields.get("text")
    if value is None:
        return find_quoted_texts(prompt)
    if row.has_cells and isinstance(value, str) and _LIST_OF_TEXTS.match(value):
        value = _read_list(row, "text", value)
    if isinstance(value, list | tuple):
        texts = [_read_string(row, "text", text).strip() for text in value]
        if not all(texts):
            raise DataError(f"{row.origin}: 'text' contains a blank text; remove it")
        return tuple(texts)
    text = _read_string(row, "text", value).strip()
    return (text,) if text else ()


def _read_id(row: Row, position: int) -> str:
    value = row.fields.get("id")
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    else:
        value = _read_string(row, "id", value).strip()
    if not value:
        return f"{position:05d}"
    if not value.isprintable() or not USABLE_ID.fullmatch(value):
        raise DataError(
            f"{row.origin}: id {shorten(value)} is used in file names; use at most {LONGEST_ID} "
            "printable characters, no slash, no leading dot"
        )
    return value


def _read_target(row: Row) -> ImageSource | None:
    named = {field: row.fields.get(field) for field in TARGET_FIELDS}
    image = named["image"]
    if isinstance(image, str) and (row.folder is None or "://" in image):
        # Data sets use this name for columns of addresses and names.
        named["image"] = None
    given = [field for field, value in named.items() if value is not None and value != ""]
    if not given:
        return None
    if len(given) > 1:
        raise DataError(f"{row.origin}: {' and '.join(given)} both name an image; keep one")
    (field,) = given
    return _read_image(row, field, named[field])


def _read_sources(row: Row, count: int) -> tuple[ImageSource, ...]:
    if count == 0:
        return ()
    given = [name for name in SOURCE_FIELDS if row.fields.get(name) not in (None, "", [])]
    if len(given) > 1:
        raise DataError(f"{row.origin}: {' and '.join(given)} both name images; keep one")
    found: tuple[ImageSource, ...] = ()
    for field in given:
        value = row.fields[field]
        if field == "sources":
            value = _read_list(row, field, value)
        values = value if isinstance(value, list | tuple) else [value]
        found = tuple(_read_image(row, field, each) for each in values)
    if len(found) != count:
        raise DataError(
            f"{row.origin}: {len(found)} source image{'' if len(found) == 1 else 's'}, but "
            f"every prompt of both files needs data.sources = {count}; correct 'source' or "
            "'sources' of this row, or data.sources"
        )
    return found


def _read_list(row: Row, field: str, value: object) -> object:
    """Parse a JSON list in a table cell."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(
            f"{row.origin}: {field!r} is {shorten(value)}, not a list ({error}); write "
            '["a", "b"], in a .csv "[""a"", ""b""]"'
        ) from error


def _read_metadata(row: Row) -> dict[str, Any]:
    """Further columns, as JSON values; what JSON has no word for, such as an image, is left out.

    Those of GenEval are checked, so that the term `composition` can score the images.
    """
    given = {
        name: _read_list(row, name, value) if name in JSON_FIELDS else value
        for name, value in row.fields.items()
        if name not in READ_FIELDS and not _is_missing(value)
    }
    try:
        # Before values are left out, because images would then be scored by less than was asked.
        read_composition(given)
    except CompositionError as error:
        raise DataError(f"{row.origin}: {error}") from error
    found = {}
    for name, value in given.items():
        with suppress(TypeError, ValueError):
            found[name] = json.dumps(value, allow_nan=False, ensure_ascii=False, default=_as_text)
    for name, text in found.items():
        _refuse_surrogate(row, name, name + text)
    return {name: json.loads(text) for name, text in found.items()}


def _is_missing(value: object) -> bool:
    # By NaN, pandas says so.
    return value is None or (isinstance(value, float) and math.isnan(value))


def _as_text(value: object) -> str:
    if isinstance(value, _HAVE_TEXT):
        return str(value)
    raise TypeError(f"JSON has no word for {value!r}")


def _read_image(row: Row, field: str, value: object) -> ImageSource:
    # How Hugging Face datasets stores an image: its bytes, or else its path.
    if isinstance(value, dict):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise DataError(
            f"{row.origin}: {field!r} is {shorten(value)}; it must be the path of an image"
        )
    _refuse_surrogate(row, field, value)
    if "://" in value:
        raise DataError(
            f"{row.origin}: {field!r} is {shorten(value)}; URLs are not read: download the image "
            "and give its path"
        )
    path = Path(os.path.expanduser(value))
    return path if row.folder is None else row.folder.absolute() / path
