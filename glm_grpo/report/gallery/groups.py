"""Stored tables of pictures as plain groups, one a prompt, for the pages."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from jaxtyping import Float32

from glm_grpo.errors import StorageError
from glm_grpo.report.gallery.marks import mark_reading
from glm_grpo.storage import storage_errors
from glm_grpo.tables import check_schema

_RAW = "raw/"
_NOTE = "note/"


def _column(name: str, kind: pyarrow.DataType) -> pyarrow.Field:
    """A column that has a value for every picture."""
    return pyarrow.field(name, kind, nullable=False)


Group = dict[str, Any]
"""One prompt's pictures with all that was stored about them, as JSON has it."""

EVALUATION_COLUMNS = (
    _column("prompt_id", pyarrow.string()),
    _column("prompt", pyarrow.string()),
    _column("texts", pyarrow.list_(pyarrow.string())),
    _column("decode_seed", pyarrow.int64()),
    pyarrow.field("target", pyarrow.string()),
    _column("total", pyarrow.float32()),
    _column("image", pyarrow.string()),
)
ROLLOUT_COLUMNS = (
    *EVALUATION_COLUMNS,
    _column("penalty", pyarrow.float32()),
    _column("advantage", pyarrow.float32()),
    _column("is_flat", pyarrow.bool_()),
)
_NUMBERS = ("total", "penalty", "advantage")


def read_groups(
    path: Path, columns: Sequence[pyarrow.Field], readers: Mapping[str, bool]
) -> tuple[Group, ...]:
    """The groups of a stored rollout or evaluation, in stored order.

    Numbers are the shortest decimals that give the stored 32-bit ones back.

    Args:
        path: Of the table.
        columns: `ROLLOUT_COLUMNS` or `EVALUATION_COLUMNS`.
        readers: Terms whose notes are what an OCR engine read, and whether case counts there.

    Raises:
        StorageError: The table is missing or damaged, or this version did not write it.
    """
    table = _read(path, [column.name for column in columns])
    try:
        return tuple(_groups(_typed(table, columns), readers))
    except (ValueError, pyarrow.ArrowException) as error:
        raise StorageError(f"{path} is damaged ({error}). Restore a copy.") from error


def pictures_of(groups: Sequence[Group]) -> Iterator[str]:
    """Paths, relative to `images/`, of all pictures and targets of groups."""
    for group in groups:
        yield from group["images"]
        if group["target"] is not None:
            yield group["target"]


def _read(path: Path, columns: Sequence[str]) -> pyarrow.Table:
    with storage_errors("read", path):
        try:
            file = pyarrow.parquet.ParquetFile(path)
            check_schema(file.schema_arrow, path)
            stored = file.schema_arrow.names
            missing = [name for name in columns if name not in stored]
            if missing:
                raise StorageError(
                    f"{path} has no column {', '.join(missing)}. Restore the table that the run "
                    "wrote."
                )
            scores = [name for name in stored if name.startswith((_RAW, _NOTE))]
            # Tables of a step are small: threads would cost more than they save.
            return file.read(columns=[*columns, *scores], use_threads=False)
        except pyarrow.ArrowException as error:
            raise StorageError(
                f"{path} is not a whole Parquet file ({error}). Remove it, or restore a copy."
            ) from error


def _typed(table: pyarrow.Table, columns: Sequence[pyarrow.Field]) -> pyarrow.Table:
    """The table with its columns as the recorder writes them.

    Raises:
        ValueError, ArrowException: One holds something else, or nothing for some picture.
    """
    scores = [
        pyarrow.field(name, pyarrow.float32() if name.startswith(_RAW) else pyarrow.string())
        for name in table.column_names
        if name.startswith((_RAW, _NOTE))
    ]
    schema = pyarrow.schema([*columns, *scores])
    return table.select(schema.names).cast(schema)


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
        if name.startswith(_RAW):
            raw[name.removeprefix(_RAW)] = None if np.isnan(column).all() else _decimals(column)
        elif name.startswith(_NOTE) and any(note is not None for note in column):
            term = name.removeprefix(_NOTE)
            notes[term] = [_note(note or "", texts, readers.get(term)) for note in column]
    group = {
        "prompt_id": prompt_id,
        "prompt": columns["prompt"][0],
        "texts": texts,
        "target": None if columns["target"][0] is None else _below_images(columns["target"][0]),
        # A string: numbers are exact up to 53 bits in JavaScript, and seeds have 64.
        "decode_seed": str(columns["decode_seed"][0]),
        "images": [_below_images(name) for name in columns["image"]],
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


def _below_images(stored: str) -> str:
    """A path relative to the run folder as one relative to its `images/`.

    Raises:
        ValueError: It leads elsewhere, where no thumbnail may be written.
    """
    path = PurePosixPath(stored)
    if path.parts[:1] != ("images",) or ".." in path.parts or "\0" in stored:
        raise ValueError(f"{stored!r} is not below images/")
    return str(path.relative_to("images"))
