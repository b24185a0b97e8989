"""Where prompts come from: a file, a folder or a hub data set, found and read row by row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError

from glm_grpo.errors import DataError
from glm_grpo.training.data.rows import (
    MOST_ROWS,
    READERS,
    Row,
    read_jsonl,
    read_text,
    shorten,
)

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_SPLIT = "train"
TARGET_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def read_rows(path: str) -> Iterator[Row]:
    """Read the rows of a prompts file, a folder or a hub data set, one at a time.

    - `.txt`: one prompt a line, blank lines skipped;
    - `.jsonl`: one object a line; `.csv` with a header; `.parquet`;
    - a folder with `metadata.jsonl` (image folder of Hugging Face datasets);
    - a folder with `prompts.txt` and `target_images/0.png`, `1.png`, ...: a picture a line;
    - anything else of the form `owner/name`: the `train` split of a hub data set.

    Text is UTF-8. A line may have `LONGEST_LINE` bytes, a cell of a `.csv` 131072 characters.

    Raises:
        DataError: There is no such thing, it cannot be parsed (the message names the line), or it
            holds no rows, or more than `MOST_ROWS`.
    """
    count = 0
    try:
        for row in _find_reader(path)():
            count += 1
            if count > MOST_ROWS:
                raise DataError(f"{path}: more than {MOST_ROWS} rows; split it")
            yield row
    except OSError as error:
        raise DataError(
            f"{shorten(path)} cannot be read ({error.strerror or error}); check the path, the disk "
            "and the permissions"
        ) from error
    if count == 0:
        raise DataError(f"{path}: holds no prompts; it needs at least one")


def _find_reader(path: str) -> Callable[[], Iterator[Row]]:
    place = Path(path)
    reader = READERS.get(place.suffix.lower())
    if place.is_dir():
        return partial(_read_folder, place)
    if place.is_file() and reader is not None:
        return partial(reader, place)
    if place.is_file():
        raise DataError(f"{path}: unknown kind of prompts file; use one of {', '.join(READERS)}")
    if place.exists():
        raise DataError(
            f"{path}: neither a file nor a folder but a pipe, a socket or a device; save the "
            "prompts to a file"
        )
    if reader is None and HUB_ID.fullmatch(path):
        return partial(_read_hub, path)
    raise DataError(
        f"{path}: no such file or folder; give a prompts file ({', '.join(READERS)}), a folder, or "
        "a hub data set as owner/name"
    )


def _read_folder(folder: Path) -> Iterator[Row]:
    metadata, prompts = folder / "metadata.jsonl", folder / "prompts.txt"
    if metadata.is_file() and prompts.is_file():
        raise DataError(f"{folder}: holds metadata.jsonl and prompts.txt; name the file to be used")
    if metadata.is_file():
        return read_jsonl(metadata)
    if prompts.is_file():
        return _pair_with_pictures(prompts, folder / "target_images")
    raise DataError(
        f"{folder}: holds neither metadata.jsonl nor prompts.txt with target_images/; add one, or "
        "name a prompts file"
    )


def _pair_with_pictures(prompts: Path, pictures: Path) -> Iterator[Row]:
    """Line i, counted from 0, belongs to picture i: what would shift the pairs is refused."""
    if not pictures.is_dir():
        raise DataError(
            f"{pictures}: no such folder; prompts without pictures are read from {prompts}"
        )
    by_number = _number_pictures(pictures)
    count = 0
    for row in read_text(prompts):
        if row.origin != f"{prompts}, line {count + 1}":
            raise DataError(
                f"{prompts}, line {count + 1}: blank, but pictures are counted by line; "
                "remove the line"
            )
        picture = by_number.pop(count, None)
        if picture is None:
            raise DataError(
                f"{row.origin}: no picture {pictures / str(count)}.png; pictures are counted "
                "from 0, one a line"
            )
        row.fields["target"] = f"{pictures.name}/{picture.name}"
        count += 1
        yield row
    for picture in by_number.values():
        raise DataError(
            f"{picture}: has no line in {prompts.name}, which has {count}; pictures are "
            "counted from 0, one a line"
        )


def _number_pictures(folder: Path) -> dict[int, Path]:
    by_number: dict[int, Path] = {}
    for picture in sorted(folder.iterdir()):
        if picture.suffix.lower() not in TARGET_SUFFIXES or not picture.stem.isdecimal():
            continue
        other = by_number.setdefault(int(picture.stem), picture)
        if other is not picture:
            raise DataError(
                f"{picture}: of the same number as {other.name}; keep one picture a line"
            )
    return by_number


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
