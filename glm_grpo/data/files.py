"""Read prompt files, folders and data sets as rows."""

from __future__ import annotations

import csv
import json
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.parquet

from glm_grpo.data.places import FILE_SUFFIXES, describe_missing, may_be_hub_id
from glm_grpo.errors import DataError

if TYPE_CHECKING:
    import datasets

PARQUET_BATCH = 64
"""Rows held in memory at once before they are checked; they may contain pictures."""

OTHER_SEPARATORS = (";", "\t", "|")
"""Separators of tables that do not use commas; many countries' spreadsheets use semicolons."""

LONGEST_SHOWN = 100
"""Characters of a value shown in an error."""

PROMPT_FIELDS = ("prompt", "id", "text")
TARGET_FIELDS = ("target", "target_image", "file_name", "image")
"""The last is where Hugging Face datasets puts the picture that `file_name` names."""

SOURCE_FIELDS = ("source", "sources")
"""Pictures to edit: one, or a list."""

READ_FIELDS = frozenset((*PROMPT_FIELDS, *TARGET_FIELDS, *SOURCE_FIELDS))

HUB_SPLIT = "train"
TARGET_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True, slots=True)
class Row:
    """One row, unchanged from its file.

    Attributes:
        origin: File and line, for errors.
        fields: Values by column name: those in `READ_FIELDS` and possibly others.
        folder: Folder that picture paths are relative to; None if the row has no folder.
        has_cells: Whether all values are text, the cells of a table.
    """

    origin: str
    fields: dict[str, object]
    folder: Path | None
    has_cells: bool = False


def shorten(value: object) -> str:
    """Format a value for an error: only the first words, however long or nested it is."""
    if isinstance(value, str | bytes):
        return repr(value[:LONGEST_SHOWN])
    return reprlib.repr(value)


def read_text(path: Path) -> Iterator[Row]:
    """Read one prompt per line; blank lines are skipped."""
    for number, line in _read_lines(path):
        first, *others = line.strip().splitlines() or [""]
        if others:
            # Some programs show a new line there, others do not.
            separator = line.strip()[len(first)]
            raise DataError(
                f"{path}, line {number}: U+{ord(separator):04X} after {shorten(first)} may be the "
                "end of a line or a part of the prompt; write a line break or a space instead"
            )
        if first:
            yield Row(f"{path}, line {number}", {"prompt": line}, path.parent)


def read_jsonl(path: Path) -> Iterator[Row]:
    """Read one object per line; blank lines are skipped."""
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            fields = json.loads(line, object_pairs_hook=_unite_pairs)
        except json.JSONDecodeError as error:
            # As after a quotation mark inside a text.
            is_cut = error.msg == "Expecting ',' delimiter"
            remedy = (
                'write \\" for a quotation mark inside a text: {"prompt": "a sign \\"OPEN\\""}'
                if is_cut
                else "write one object per line"
            )
            raise DataError(
                f"{origin}, column {error.colno}: not valid JSON ({error.msg}); {remedy}"
            ) from error
        except ValueError as error:
            raise DataError(f"{origin}: {error}; write every key once") from error
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
            raise ValueError(f"key {shorten(name)} appears twice in an object")
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
                    f"{origin}: {len(cells)} cells under a header of {len(header)}; put cells that "
                    "contain commas in double quotes"
                )
            # An empty cell is the only way for a table to express a missing value.
            given: dict[str, object] = {
                name: cell for name, cell in zip(header, cells, strict=True) if cell != ""
            }
            yield Row(origin, given, path.parent, has_cells=True)
    except csv.Error as error:
        raise DataError(
            f"{path}, line {first_line}: not valid CSV ({error}); separate cells by commas and "
            "double the quotes inside quoted cells"
        ) from error


def _check_header(header: list[str], origin: str) -> list[str]:
    if "prompt" not in header:
        separator = next((each for each in OTHER_SEPARATORS if each in header[0]), None)
        if separator is not None and len(header) == 1:
            raise DataError(
                f"{origin}: the header {shorten(header)} uses {separator!r} as its separator; save "
                "the file with commas between the cells"
            )
        raise DataError(
            f"{origin}: the header {shorten(header)} has no column 'prompt'; rename the column "
            "that holds the prompts to 'prompt'"
        )
    if len(set(header)) != len(header):
        raise DataError(f"{origin}: the header {shorten(header)} names a column twice; rename one")
    return header


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            header = _check_header(table.schema_arrow.names, str(path))
            # Other columns may be of any size; only their names are needed.
            columns = [name for name in header if name in READ_FIELDS]
            others = dict.fromkeys(name for name in header if name not in READ_FIELDS)
            number = 0
            for batch in table.iter_batches(PARQUET_BATCH, columns=columns):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", fields | others, path.parent)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file ({error}); write it again") from error


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers, from 1, so that an invalid byte is reported on its line.

    Lines end as on Unix, Windows or the first Macs.
    """
    # Each byte is a character at first: reading UTF-8 would fail in blocks, not by line.
    with path.open(encoding="latin-1") as stream:
        for number, characters in enumerate(stream, start=1):
            line = characters.removesuffix("\n").encode("latin-1")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: byte 0x{line[error.start]:02x} at column "
                    f"{error.start + 1} is not UTF-8; save the file as UTF-8"
                ) from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = dict(
    zip(FILE_SUFFIXES, (read_text, read_jsonl, _read_csv, _read_parquet), strict=True)
)
"""Readers by file suffix."""


def read_rows(path: str) -> Iterator[Row]:
    """Read the rows of a prompts file, a folder or a hub data set, one at a time.

    - `.txt`: one prompt per line, blank lines skipped;
    - `.jsonl`: one object per line; `.csv` with a header; `.parquet`;
    - a folder with `metadata.jsonl` (image folder of Hugging Face datasets);
    - a folder with `prompts.txt` and `target_images/0.png`, `1.png`, ...: one picture per line;
    - a folder written by `Dataset.save_to_disk`;
    - anything else of the form `owner/name`: the `train` split of a hub data set.

    Raises:
        DataError: The path does not exist, cannot be parsed (the message names the line), or
            contains no rows.
    """
    is_empty = True
    try:
        for row in _find_reader(path)():
            is_empty = False
            yield row
    except OSError as error:
        raise DataError(
            f"{shorten(path)} cannot be read ({error.strerror or error}); check the path, the disk "
            "and the permissions"
        ) from error
    if is_empty:
        raise DataError(f"{path}: contains no prompts; it needs at least one")


def _find_reader(path: str) -> Callable[[], Iterator[Row]]:
    place = Path(path)
    reader = READERS.get(place.suffix.lower())
    if place.is_dir():
        return partial(_read_folder, place)
    if place.is_file() and reader is not None:
        return partial(reader, place)
    if place.is_file():
        raise DataError(f"{path}: unknown kind of prompts file; use one of {', '.join(READERS)}")
    if may_be_hub_id(path):
        return partial(_read_hub, path)
    raise DataError(describe_missing(path))


def _read_folder(folder: Path) -> Iterator[Row]:
    metadata, prompts = folder / "metadata.jsonl", folder / "prompts.txt"
    if metadata.is_file() and prompts.is_file():
        raise DataError(f"{folder}: contains metadata.jsonl and prompts.txt; name the file to use")
    if metadata.is_file():
        return read_jsonl(metadata)
    if prompts.is_file():
        return _pair_with_pictures(prompts, folder / "target_images")
    if (folder / "state.json").is_file():
        return _read_saved(folder)
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        (first, *_) = json.loads(splits.read_text())["splits"]
        raise DataError(
            f"{folder}: a data set with several splits; name the folder of one, such as "
            f"{folder / first}"
        )
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in FILE_SUFFIXES)
    remedy = f"name one of its files, such as {files[0]}" if files else "name a prompts file"
    raise DataError(
        f"{folder}: contains neither metadata.jsonl nor prompts.txt with target_images/; {remedy}"
    )


def _pair_with_pictures(prompts: Path, pictures: Path) -> Iterator[Row]:
    """Pair line i, counted from 0, with picture i; refuse anything that would shift the pairs."""
    if not pictures.is_dir():
        raise DataError(
            f"{pictures}: no such folder; prompts without images are read from {prompts}"
        )
    by_number = _number_pictures(pictures)
    count = 0
    for row in read_text(prompts):
        if row.origin != f"{prompts}, line {count + 1}":
            raise DataError(
                f"{prompts}, line {count + 1}: blank, but images are counted by line; "
                "remove the line"
            )
        picture = by_number.pop(count, None)
        if picture is None:
            raise DataError(
                f"{row.origin}: no image {pictures / str(count)}.png; images are counted from "
                "0, one per line"
            )
        row.fields["target"] = f"{pictures.name}/{picture.name}"
        count += 1
        yield row
    for picture in by_number.values():
        raise DataError(
            f"{picture}: has no line in {prompts.name}, which has {count}; images are counted "
            "from 0, one per line"
        )


def _number_pictures(folder: Path) -> dict[int, Path]:
    by_number: dict[int, Path] = {}
    for picture in sorted(folder.iterdir()):
        if picture.suffix.lower() not in TARGET_SUFFIXES or not picture.stem.isdecimal():
            continue
        other = by_number.setdefault(int(picture.stem), picture)
        if other is not picture:
            raise DataError(
                f"{picture}: has the same number as {other.name}; keep one image per line"
            )
    return by_number


def _read_saved(folder: Path) -> Iterator[Row]:
    import datasets  # noqa: PLC0415 (slow to import)

    return _read_table(datasets.load_from_disk(folder), str(folder))


def _read_hub(name: str) -> Iterator[Row]:
    import datasets  # noqa: PLC0415 (slow to import)
    from datasets.exceptions import DatasetsError  # noqa: PLC0415

    try:
        table = datasets.load_dataset(name, split=HUB_SPLIT)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(
            f"{name}: neither a file or folder here nor a hub data set that can be loaded with "
            f"split {HUB_SPLIT!r} ({error}); check the name and the network, or download it first"
        ) from error
    return _read_table(table, name)


def _read_table(table: datasets.Dataset, name: str) -> Iterator[Row]:
    """Yield rows with pictures as files or bytes, which are decoded later like all others."""
    import datasets  # noqa: PLC0415 (slow to import)

    undecoded = datasets.Image(decode=False)
    for column, feature in table.features.items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(column, undecoded)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            table = table.cast_column(column, datasets.List(undecoded))
    for number, fields in enumerate(table, start=1):
        yield Row(f"{name}, row {number}", dict(fields), None)
