"""Files of prompts of every format, read into rows that remember where they stand."""

from __future__ import annotations

import csv
import json
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet

from glm_grpo.errors import DataError

LONGEST_LINE = 4 * 2**20
"""Bytes. A file without line breaks is refused before it fills the memory."""

MOST_ROWS = 10_000_000
"""A table of a few kilobytes can claim more rows than any memory holds."""

PARQUET_BATCH = 64
"""Rows that are in memory at once before they are checked; they may hold pictures."""

BOM = b"\xef\xbb\xbf"
LONGEST_SHOWN = 100
"""Characters of a value in an error, which is not to fill the screen."""

PROMPT_FIELDS = ("prompt", "id", "text")
TARGET_FIELDS = ("target", "target_image", "file_name")
EMBEDDED_TARGET_FIELD = "image"
"""Where Hugging Face datasets puts the picture that `file_name` names."""

READ_FIELDS = frozenset((*PROMPT_FIELDS, *TARGET_FIELDS, EMBEDDED_TARGET_FIELD))


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in its file.

    Attributes:
        origin: File and line, for errors.
        fields: Values by column name, those of `READ_FIELDS` and maybe others.
        folder: Where paths of pictures start; None where the row came with no folder.
    """

    origin: str
    fields: dict[str, object]
    folder: Path | None


def shorten(value: object) -> str:
    """A value as an error shows it: a few words of it, however long or deep it is."""
    if isinstance(value, str | bytes):
        return repr(value[:LONGEST_SHOWN])
    return reprlib.repr(value)


def read_text(path: Path) -> Iterator[Row]:
    """Read one prompt a line; blank lines are skipped."""
    for number, line in _read_lines(path):
        if line.strip():
            yield Row(f"{path}, line {number}", {"prompt": line}, path.parent)


def read_jsonl(path: Path) -> Iterator[Row]:
    """Read one object a line; blank lines are skipped."""
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            fields = json.loads(line, object_pairs_hook=_unite_pairs)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{origin}, column {error.colno}: not valid JSON ({error.msg}); write one object "
                "a line"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{origin}: not usable JSON ({error}); write a plain object that names every key "
                "once"
            ) from error
        if not isinstance(fields, dict):
            raise DataError(
                f"{origin}: {shorten(line.strip())} is not an object; write "
                '{"prompt": "..."} on every line'
            )
        yield Row(origin, fields, path.parent)


def _unite_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"key {shorten(name)} stands twice in an object")
        fields[name] = value
    return fields


def _read_csv(path: Path) -> Iterator[Row]:
    reader = csv.reader((f"{line}\n" for _, line in _read_lines(path)), strict=True)
    header: list[str] = []
    first_line = 1
    try:
        for cells in reader:
            origin = f"{path}, line {first_line}"
            first_line = reader.line_num + 1
            if not cells:
                continue
            if not header:
                header = _check_header([cell.strip() for cell in cells], origin)
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{origin}: {len(cells)} cells under a header of {len(header)}; put cells "
                    "that hold commas in double quotes"
                )
            yield Row(origin, dict(zip(header, cells, strict=True)), path.parent)
    except csv.Error as error:
        raise DataError(
            f"{path}, line {first_line}: not valid CSV ({error}); separate cells by commas and "
            "double the quotes inside quoted cells"
        ) from error


def _check_header(header: list[str], origin: str) -> list[str]:
    if "prompt" not in header:
        raise DataError(
            f"{origin}: the header {shorten(header)} has no column 'prompt'; name the column of "
            "the prompts so"
        )
    if len(set(header)) != len(header):
        raise DataError(f"{origin}: the header {shorten(header)} names a column twice; rename one")
    return header


def _read_parquet(path: Path) -> Iterator[Row]:
    number = 0
    for batch in _read_batches(path):
        for fields in batch:
            number += 1
            yield Row(f"{path}, row {number}", fields, path.parent)


def _read_batches(path: Path) -> Iterator[list[dict[str, object]]]:
    """Only columns that are read are decoded: others may be of any size and type."""
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            header = _check_header(table.schema_arrow.names, str(path))
            if table.metadata.num_rows > MOST_ROWS:
                raise DataError(f"{path}: more than {MOST_ROWS} rows; split it")
            columns = [name for name in header if name in READ_FIELDS]
            for batch in table.iter_batches(PARQUET_BATCH, columns=columns):
                yield batch.to_pylist()
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: not a readable parquet file ({error}); write it again") from error


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; line by line, so that a bad byte is found on its line."""
    with path.open("rb") as stream:
        lines = iter(partial(stream.readline, LONGEST_LINE + 1), b"")
        for number, line in enumerate(lines, start=1):
            origin = f"{path}, line {number}"
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"{origin}: longer than {LONGEST_LINE} bytes; end every row with a line break"
                )
            yield number, _decode_line(line.removeprefix(BOM) if number == 1 else line, origin)


def _decode_line(line: bytes, origin: str) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{origin}: byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; "
            "save the file as UTF-8"
        ) from error
    text = text.removesuffix("\n").removesuffix("\r")
    if "\0" in text:
        raise DataError(f"{origin}: holds a null character; save the file as UTF-8 text")
    if "\r" in text:
        raise DataError(
            f"{origin}: holds a carriage return that ends no line; save the file with the line "
            "ends of Unix or Windows"
        )
    return text


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".txt": read_text,
    ".jsonl": read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""By suffix."""
