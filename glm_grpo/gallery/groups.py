"""Stored tables of pictures as plain groups, one a prompt, for the pages."""

from __future__ import annotations

import contextlib
import itertools
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from jaxtyping import Float32

from glm_grpo.errors import StorageError
from glm_grpo.gallery.marks import mark_reading
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import NOTE, RAW, picture_name, read_table, with_comparable_totals

Group = dict[str, Any]
"""One prompt's pictures with all that was stored about them, as JSON has it."""

EVALUATION_COLUMNS = (
    *("step", "prompt_id", "prompt", "texts", "decode_seed", "target", "total", "image"),
    *(RAW, NOTE),
)
ROLLOUT_COLUMNS = (*EVALUATION_COLUMNS, "penalty", "advantage", "is_flat")
_NUMBERS = ("total", "penalty", "advantage")


def read_groups(
    path: Path,
    columns: Sequence[str],
    readers: Mapping[str, bool],
    *,
    evaluated: RunFolder | None = None,
) -> tuple[Group, ...]:
    """The groups of a stored rollout or evaluation, in stored order.

    Numbers are the shortest decimals that give the stored 32-bit ones back.

    Args:
        path: Of the table.
        columns: `ROLLOUT_COLUMNS` or `EVALUATION_COLUMNS`.
        readers: Terms whose notes are what an OCR engine read, and whether case counts there.
        evaluated: The run, if the table is of an evaluation: its totals are then comparable with
            those of the others, see `with_comparable_totals`, or as stored where step 0 is lost.

    Raises:
        StorageError: The table is missing or damaged, or this version did not write it.
    """
    table = read_table(path, columns)
    if evaluated is not None:
        with contextlib.suppress(StorageError):
            table = with_comparable_totals(evaluated, path, table)
    try:
        return tuple(_groups(table, readers))
    except ValueError as error:
        raise StorageError(f"{path} is damaged ({error}). Restore a copy.") from error


def pictures_of(groups: Sequence[Group]) -> Iterator[str]:
    """Paths, relative to `images/`, of all pictures and targets of groups."""
    for group in groups:
        yield from group["images"]
        if group["target"] is not None:
            yield group["target"]


def _groups(table: pyarrow.Table, readers: Mapping[str, bool]) -> Iterator[Group]:
    columns = {
        field.name: _floats(column) if field.type == pyarrow.float32() else column.to_pylist()
        for field, column in zip(table.schema, table.columns, strict=True)
    }
    for _, rows in itertools.groupby(range(table.num_rows), columns["prompt_id"].__getitem__):
        first, *others = rows
        part = slice(first, first + 1 + len(others))
        yield _group({name: column[part] for name, column in columns.items()}, readers)


def _group(columns: Mapping[str, Any], readers: Mapping[str, bool]) -> Group:
    """A group from the columns of its rows."""
    prompt_id, texts = columns["prompt_id"][0], columns["texts"][0]
    raw, notes = {}, {}
    for name, column in columns.items():
        if name.startswith(RAW):
            raw[name.removeprefix(RAW)] = None if np.isnan(column).all() else _decimals(column)
        elif name.startswith(NOTE) and any(note is not None for note in column):
            term = name.removeprefix(NOTE)
            notes[term] = [_note(note or "", texts, readers.get(term)) for note in column]
    group = {
        "prompt_id": prompt_id,
        "prompt": columns["prompt"][0],
        "texts": texts,
        "target": None if columns["target"][0] is None else picture_name(columns["target"][0]),
        # A string: numbers are exact up to 53 bits in JavaScript, and seeds have 64.
        "decode_seed": str(columns["decode_seed"][0]),
        "images": [picture_name(name) for name in columns["image"]],
        "raw": raw,
        "notes": notes,
    }
    group |= {name: _decimals(columns[name]) for name in _NUMBERS if name in columns}
    if "is_flat" in columns:
        group["is_flat"] = columns["is_flat"][0]
    return group


def _floats(column: pyarrow.ChunkedArray) -> Float32[np.ndarray, " rows"]:
    """A column of numbers; NaN where it has none."""
    return np.asarray(column.to_numpy(), dtype=np.float32)


def _decimals(values: Float32[np.ndarray, " rows"]) -> list[float]:
    """The shortest decimals that give 32-bit numbers back.

    Raises:
        ValueError: One is not finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("numbers are missing or not finite for some pictures of a prompt")
    return [float(text) for text in values.astype(str)]


def _note(note: str, texts: Sequence[str], is_case_sensitive: bool | None) -> Any:
    """What a term said of a picture: the text, or for OCR terms its letters, right and wrong."""
    if is_case_sensitive is None:
        return note
    # Engines return full-width letters, which score as Latin ones do and which many fonts lack.
    read = unicodedata.normalize("NFKC", note)
    marks = mark_reading(read, texts, is_case_sensitive=is_case_sensitive)
    return {"read": read, "marks": marks}
