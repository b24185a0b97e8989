"""Prompt files of every format, read into rows that remember where they stand."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
from datasets.exceptions import DatasetsError

from glm_grpo.errors import DataError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_SPLIT = "train"
TARGET_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class Row:
    """One row as it stands in its file.

    Attributes:
        origin: File and line, for errors.
        fields: Values by column name; columns that nobody reads are still there.
        folder: Where paths of pictures start; None where the row came with no folder.
    """

    origin: str
    fields: dict[str, object]
    folder: Path | None


def read_rows(path: str) -> list[Row]:
    """Read the rows of a prompts file, a folder or a hub data set.

    - `.txt`: one prompt a line, blank lines skipped;
    - `.jsonl`: one object a line; `.csv` with a header; `.parquet`;
    - a folder with `metadata.jsonl` (image folder of Hugging Face datasets);
    - a folder with `prompts.txt` and `target_images/0.png`, `1.png`, ...: a picture a line;
    - anything else of the form `owner/name`: the `train` split of a hub data set.

    Raises:
        DataError: There is no such thing, it cannot be parsed (the message names the line), or it
            holds no rows.
    """
    place = Path(path)
    reader = READERS.get(place.suffix.lower())
    if place.is_dir():
        rows = _read_folder(place)
    elif place.is_file() and reader is not None:
        rows = list(reader(place))
    elif place.is_file():
        raise DataError(f"{path}: unknown kind of prompts file; use one of {', '.join(READERS)}")
    elif reader is None and HUB_ID.fullmatch(path):
        rows = list(_read_hub(path))
    else:
        raise DataError(
            f"{path}: no such file or folder; give a prompts file "
            f"({', '.join(READERS)}), a folder, or a hub data set as owner/name"
        )
    if not rows:
        raise DataError(f"{path}: holds no prompts; it needs at least one")
    return rows


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; line by line, so that a bad byte is found on its line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the file") from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, line {number}: byte 0x{line[error.start]:02x} at column "
                f"{error.start + 1} is not UTF-8; save the file as UTF-8"
            ) from error
        if "\0" in text:
            raise DataError(
                f"{path}, line {number}: holds a null character; save the file as UTF-8 text"
            )
        yield number, text.removesuffix("\r")


def _read_text(path: Path) -> Iterator[Row]:
    for number, line in _read_lines(path):
        if line.strip():
            yield Row(f"{path}, line {number}", {"prompt": line}, path.parent)


def _read_jsonl(path: Path) -> Iterator[Row]:
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{origin}, column {error.colno}: not valid JSON ({error.msg}); write one object "
                "a line"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{origin}: not usable JSON ({error}); write a plain object") from error
        if not isinstance(fields, dict):
            raise DataError(
                f"{origin}: {line.strip()[:60]!r} is not an object; write "
                '{"prompt": "..."} on every line'
            )
        yield Row(origin, fields, path.parent)


def _read_csv(path: Path) -> Iterator[Row]:
    text = "\n".join(line for _, line in _read_lines(path))
    reader = csv.reader(StringIO(text, newline=""), strict=True)
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
            f"{origin}: the header {header} has no column 'prompt'; the first line names columns"
        )
    if len(set(header)) != len(header):
        raise DataError(f"{origin}: the header {header} names a column twice; rename one")
    return header


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        records = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable parquet file ({error}); write it again") from error
    for number, fields in enumerate(records, start=1):
        yield Row(f"{path}, row {number}", fields, path.parent)


def _read_folder(folder: Path) -> list[Row]:
    metadata, prompts = folder / "metadata.jsonl", folder / "prompts.txt"
    if metadata.is_file() and prompts.is_file():
        raise DataError(f"{folder}: holds metadata.jsonl and prompts.txt; name the file to be used")
    if metadata.is_file():
        return list(_read_jsonl(metadata))
    if prompts.is_file():
        return _pair_with_pictures(prompts, folder / "target_images")
    raise DataError(
        f"{folder}: holds neither metadata.jsonl nor prompts.txt with target_images/; add one, or "
        "name a prompts file"
    )


def _pair_with_pictures(prompts: Path, pictures: Path) -> list[Row]:
    """Line i, counted from 0, belongs to picture i: what would shift the pairs is refused."""
    if not pictures.is_dir():
        raise DataError(
            f"{pictures}: no such folder; prompts without pictures are read from {prompts}"
        )
    by_number = {
        int(picture.stem): picture
        for picture in sorted(pictures.iterdir())
        if picture.suffix.lower() in TARGET_SUFFIXES and picture.stem.isdecimal()
    }
    rows = list(_read_text(prompts))
    for position, row in enumerate(rows):
        if row.origin != f"{prompts}, line {position + 1}":
            raise DataError(
                f"{prompts}, line {position + 1}: blank, but pictures are counted by line; "
                "remove the line"
            )
        picture = by_number.pop(position, None)
        if picture is None:
            raise DataError(
                f"{row.origin}: no picture {pictures / str(position)}.png; pictures are counted "
                "from 0, one a line"
            )
        row.fields["target"] = f"{pictures.name}/{picture.name}"
    for picture in by_number.values():
        raise DataError(
            f"{picture}: has no line in {prompts.name}, which has {len(rows)}; pictures are "
            "counted from 0, one a line"
        )
    return rows


def _read_hub(name: str) -> Iterator[Row]:
    try:
        table = datasets.load_dataset(name, split=HUB_SPLIT)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(
            f"{name}: neither a file or folder here nor a hub data set that can be loaded with "
            f"split {HUB_SPLIT!r} ({error}); check the name and the network, or download it first"
        ) from error
    for column, feature in table.features.items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(column, datasets.Image(decode=False))
    for number, fields in enumerate(table, start=1):
        yield Row(f"{name}, row {number}", dict(fields), None)


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".txt": _read_text,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
