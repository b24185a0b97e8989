"""Read prompt files, folders and data sets as rows."""

from __future__ import annotations

import csv
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet

from glm_grpo.data.places import FILE_SUFFIXES, describe_missing, may_be_hub_id
from glm_grpo.errors import DataError
from glm_grpo.output import counted

PARQUET_BATCH = 64
"""Rows held in memory at once before they are checked; they may contain images."""

LONGEST_SHOWN = 100
"""Characters of a value shown in an error."""

TARGET_FIELDS = ("target", "target_image", "file_name", "image")
"""The last is where Hugging Face datasets puts the image that `file_name` names."""

SOURCE_FIELDS = ("source", "sources")
"""Images to edit: one, or a list."""

READ_FIELDS = frozenset(("prompt", "id", "text", *TARGET_FIELDS, *SOURCE_FIELDS))
"""Fields with a meaning; all others are metadata."""

JSON_FIELDS = ("include", "exclude")
"""Metadata of GenEval's rows, which a table may write as JSON."""

ASKING_FIELDS = (*JSON_FIELDS, "tag")
"""All metadata of GenEval's rows."""

HUB_SPLIT = "train"
TARGET_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True, slots=True)
class Row:
    """One row, unchanged from its file.

    Attributes:
        origin: File and line, for errors.
        fields: Values by column name: those in `READ_FIELDS` and possibly others.
        folder: Folder that image paths are relative to; None if the row has no folder.
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


def _read_text(path: Path) -> Iterator[Row]:
    """Read one prompt per line; blank lines are skipped."""
    for number, line in _read_lines(path):
        if line.strip():
            yield Row(f"{path}, line {number}", {"prompt": line}, path.parent)


def _read_jsonl(path: Path) -> Iterator[Row]:
    """Read one object per line; blank lines are skipped."""
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            fields = json.loads(line.rstrip("\n"), object_pairs_hook=partial(_to_fields, origin))
        except json.JSONDecodeError as error:
            raise DataError(
                f"{origin}, column {error.colno}: not valid JSON ({error.msg}); write one object "
                'per line, and \\" for a quotation mark inside a text: '
                '{"prompt": "a sign \\"OPEN\\""}'
            ) from error
        if not isinstance(fields, dict):
            raise DataError(
                f"{origin}: {shorten(line.strip())} is not an object; write "
                '{"prompt": "..."} on every line'
            )
        yield Row(origin, fields, path.parent)


def _to_fields(origin: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    _refuse_repeated([name for name, _ in pairs], origin, "key")
    return dict(pairs)


def _refuse_repeated(names: Sequence[str], origin: str, kind: str) -> None:
    """Refuse names that occur twice: readers would silently keep the last."""
    for name, count in Counter(names).items():
        # Spreadsheets write unused columns without a name.
        if count > 1 and name:
            raise DataError(f"{origin}: the {kind} {shorten(name)} occurs {count} times; keep one")


def _read_csv(path: Path) -> Iterator[Row]:
    lines = (line for _, line in _read_lines(path))
    reader = csv.DictReader(lines, strict=True, skipinitialspace=True)
    try:
        _refuse_repeated(reader.fieldnames or (), f"{path}, line {reader.line_num}", "column")
        for cells in reader:
            origin = f"{path}, line {reader.line_num}"
            if None in cells or None in cells.values():
                raise DataError(
                    f"{origin}: another number of cells than in the header; put cells that contain "
                    "commas in double quotes"
                )
            # An empty cell is the only way for a table to express a missing value.
            given = {name: cell for name, cell in cells.items() if cell != ""}
            yield Row(origin, given, path.parent, has_cells=True)
    except csv.Error as error:
        raise DataError(
            f"{path}, after line {reader.line_num}: not valid CSV ({error}); separate cells by "
            "commas and double the quotes inside quoted cells"
        ) from error


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            # Columns of bytes may be of any size.
            schema = table.schema_arrow
            _refuse_repeated(schema.names, str(path), "column")
            columns = [
                column.name
                for column in schema
                if column.name in {*READ_FIELDS, *ASKING_FIELDS} or not _has_bytes(column.type)
            ]
            others = dict.fromkeys(name for name in schema.names if name not in columns)
            number = 0
            for batch in table.iter_batches(PARQUET_BATCH, columns=columns):
                for place in range(len(batch)):
                    number += 1
                    (fields,) = batch.slice(place, 1).to_pylist()
                    yield Row(f"{path}, row {number}", fields | others, path.parent)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, row {number}: contains text that is not UTF-8 ({error}); write it as UTF-8"
        ) from error
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file ({error}); write it again") from error


def _has_bytes(kind: pyarrow.DataType) -> bool:
    """Whether values are bytes, or contain some, as images of Hugging Face datasets do."""
    is_bytes = pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)
    is_nested = pyarrow.types.is_nested(kind)
    return is_bytes or (
        is_nested and any(_has_bytes(kind.field(each).type) for each in range(kind.num_fields))
    )


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers, from 1; they end as on Unix, Windows or the first Macs."""
    try:
        with path.open(encoding="utf-8-sig") as stream:
            yield from enumerate(stream, start=1)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = dict(
    zip(FILE_SUFFIXES, (_read_text, _read_jsonl, _read_csv, _read_parquet), strict=True)
)
"""Readers by file suffix."""


def read_rows(path: str) -> Iterator[Row]:
    """Read the rows of a prompts file, a folder or a hub data set, one at a time.

    - `.txt`: one prompt per line, blank lines skipped;
    - `.jsonl`: one object per line; `.csv` with a header; `.parquet`;
    - a folder with `metadata.jsonl` (image folder of Hugging Face datasets);
    - a folder with `prompts.txt` and `target_images/0.png`, `1.png`, ...: one image per line;
    - anything else of the form `owner/name`: the `train` split of a hub data set.
    """
    is_empty = True
    for row in _find_reader(path)():
        is_empty = False
        yield row
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
    if metadata.is_file():
        return _read_jsonl(metadata)
    if prompts.is_file() and (folder / "target_images").is_dir():
        return _pair_with_images(prompts, folder / "target_images")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in FILE_SUFFIXES)
    remedy = f"name one of its files, such as {files[0]}" if files else "name a prompts file"
    raise DataError(
        f"{folder}: contains neither metadata.jsonl nor prompts.txt with target_images/; {remedy}"
    )


def _pair_with_images(prompts: Path, folder: Path) -> Iterator[Row]:
    """Pair line i, counted from 0, with image i; refuse anything that would shift the pairs."""
    rows = list(_read_text(prompts))
    numbered = sorted(
        (int(path.stem), path)
        for path in folder.iterdir()
        if path.suffix.lower() in TARGET_SUFFIXES and path.stem.isdecimal()
    )
    numbers = [number for number, _ in numbered]
    if numbers != list(range(len(rows))):
        wrong = sorted({*numbers} ^ {*range(len(rows))})[:1] or "a number twice"
        raise DataError(
            f"{folder}: has {counted(len(numbers), 'numbered image')} for "
            f"{counted(len(rows), 'prompt')} in {prompts} "
            f"(see {wrong}); give one per line, counted from 0: 0.png, 1.png, ..."
        )
    for row, (_, path) in zip(rows, numbered, strict=True):
        row.fields["target"] = f"{folder.name}/{path.name}"
        yield row


def _read_hub(name: str) -> Iterator[Row]:
    """Yield rows with images as files or bytes, which are decoded later like all others."""
    import datasets  # noqa: PLC0415 (slow to import)
    from datasets.exceptions import DatasetsError  # noqa: PLC0415

    try:
        table = datasets.load_dataset(name, split=HUB_SPLIT)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(
            f"{name}: neither a file or folder here nor a hub data set that can be loaded with "
            f"split {HUB_SPLIT!r} ({error}); check the name and the network, or download it first"
        ) from error
    undecoded = datasets.Image(decode=False)
    for column, feature in table.features.items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(column, undecoded)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            table = table.cast_column(column, datasets.List(undecoded))
    for number, fields in enumerate(table, start=1):
        yield Row(f"{name}, row {number}", dict(fields), None)
