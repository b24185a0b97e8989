"""The one reader of what a run stored: metrics, tables, bands of canaries, names of trackers' runs.

Each kind of file has one schema here. What does not fit it is a `StorageError` that names the file
and the field. `glm_grpo.training.recording.recorder` writes the files; reports and commands read
them here, without a model. `config.yaml` is read by `glm_grpo.run.config`, a checkpoint by
`glm_grpo.training.checkpoint.files`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import torch
from pydantic import BaseModel, ConfigDict, Field, RootModel, Strict, ValidationError
from pydantic_core import from_json

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder, step_of, storage_errors
from rewards.audit.canaries import Band
from rewards.reweigh import Mode, combine
from rewards.types import RewardError, RewardTable

MetricsRow = dict[str, int | float | None]
"""One line of `metrics.jsonl`: `step` and the metrics; None was not finite."""

Step = Annotated[int, Strict(), Field(ge=0, le=2**31 - 1)]
"""A step as it is stored; tables hold it in 32 bits."""

Finite = Annotated[float, Strict(), Field(allow_inf_nan=False)]

METADATA_KEY = b"glm_grpo"
"""Key in the schema metadata of a table; its JSON holds `schema` and the fields of `Weighing`."""

SCHEMA = 2
"""Version of the columns; a table of another version is refused."""

RAW = "raw/"
"""Columns of the terms' scores; null where a term does not apply."""
NOTE = "note/"
"""Columns of what terms said of a picture; null where they said nothing."""
SOURCES = "sources"
"""Column of the source pictures' paths; only runs on edits have it."""


def _list_of(kind: pyarrow.DataType) -> pyarrow.DataType:
    """As Parquet names it."""
    return pyarrow.list_(pyarrow.field("element", kind))


_COLUMNS = {
    "step": pyarrow.int32(),
    "prompt_id": pyarrow.string(),
    "prompt": pyarrow.string(),
    "texts": _list_of(pyarrow.string()),
    "sample": pyarrow.int32(),
    "decode_seed": pyarrow.int64(),
    "target": pyarrow.string(),
    SOURCES: _list_of(pyarrow.string()),
    "source_token_ids": _list_of(pyarrow.int32()),
    "token_ids": _list_of(pyarrow.int32()),
    "log_probs": _list_of(pyarrow.float32()),
    "total": pyarrow.float32(),
    "penalty": pyarrow.float32(),
    "advantage": pyarrow.float32(),
    "is_flat": pyarrow.bool_(),
    "image": pyarrow.string(),
}
"""What the recorder writes, and its types; those of sources where the run has some."""

_PICTURES = ("image", "target", SOURCES)
_IMAGES = "images"
_LONGEST_NAME = 250
"""Characters; the longest that a run writes has 110, and a file system takes 255 bytes."""
_RESTORE = "Restore a copy."

Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True)
class Weighing:
    """How the totals of a stored table came from its raw scores.

    Those of an evaluation depend on the evaluation of step 0 as well, save under `weighted_sum`,
    see `read_evaluation`.

    Attributes:
        weights: By name of the term.
        std_floors: By name of the term, see `RewardTable`.
        combine: How the weighted terms are combined.
    """

    weights: dict[str, float]
    std_floors: dict[str, float]
    combine: Mode


class _Weighing(BaseModel):
    """The schema metadata of a table, see `Weighing`."""

    weights: dict[str, Finite]
    std_floors: dict[str, Finite]
    combine: Mode


class _Metrics(BaseModel):
    """A line of `metrics.jsonl`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[int, Strict()] | Annotated[float, Strict()] | None]

    step: Step


class _Band(BaseModel):
    """See `Band`."""

    model_config = ConfigDict(extra="forbid")

    mean: Finite
    std: Finite = Field(ge=0)
    prompts: Annotated[int, Strict()] = Field(ge=1, le=2**31 - 1)
    collapse_below: Finite | None = None
    is_judged_below: Annotated[bool, Strict()] = True
    is_of_evaluations: Annotated[bool, Strict()] = False


class _Bands(RootModel[dict[str, _Band]]):
    """`canaries.json`, by name of the canary."""


class _RunIds(RootModel[dict[str, str]]):
    """`trackers.json`, by name of the tracker."""


class _Version(BaseModel):
    """Of a table; the first one did not say it."""

    version: int = Field(1, alias="schema")


def check_stored(schema: type[Schema], content: str | bytes, place: str) -> Schema:
    """What a JSON text of a run folder says, or which field of it does not fit.

    Args:
        content: The text.
        place: The file, or the line of it, for the error.

    Raises:
        StorageError: It is no JSON, or not of the schema; names place and field.
    """
    try:
        return schema.model_validate(from_json(content))
    except ValidationError as error:
        reason = describe_misfit(error)
    # No JSON, or nested without end.
    except ValueError as error:
        reason = str(error)
    raise StorageError(f"{place} is damaged ({reason}); restore it from a copy")


def describe_misfit(error: ValidationError) -> str:
    """The first field that does not fit, what is there, and the rule."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part)[:80] for part in first["loc"]) or "the whole"
    return f"{field} is {_show(first['input'])}: {first['msg']}"


def _show(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "(a number of thousands of digits)"


def read_metrics(folder: RunFolder) -> list[MetricsRow]:
    """All lines of `metrics.jsonl` in order; None stands for a value that was not finite.

    A last line torn by a kill is left out, and a run without metrics gives an empty list.

    Raises:
        StorageError: The file cannot be read, or a line before the last is not a JSON object of
            numbers with the number of its step.
    """
    path = folder.metrics_path
    if not path.exists():
        return []
    with storage_errors("read", path):
        lines = path.read_bytes().split(b"\n")
    rows: list[MetricsRow] = []
    # What follows the last line feed is empty, or was being written when the process died.
    for number, line in enumerate(lines[:-1], start=1):
        row = check_stored(_Metrics, line, f"line {number} of {path}")
        rows.append({"step": row.step} | {k: _finite(v) for k, v in row.__pydantic_extra__.items()})
    return rows


def _finite(value: int | float | None) -> int | float | None:
    """A number that a float holds, else None."""
    # Whole numbers have no bound in JSON, and math.isfinite raises over the largest.
    return value if value is not None and abs(value) <= sys.float_info.max else None


def read_bands(folder: RunFolder) -> dict[str, Band] | None:
    """Bands of the canaries; None where the run has stored none.

    Raises:
        StorageError: The file cannot be read, or holds something else.
    """
    path = folder.canaries_path
    if not path.exists():
        return None
    with storage_errors("read", path):
        content = path.read_bytes()
    bands = check_stored(_Bands, content, str(path)).root
    return {name: Band(**band.model_dump()) for name, band in bands.items()}


def read_run_ids(folder: RunFolder) -> dict[str, str]:
    """What each tracker calls the run, by name of the tracker.

    Raises:
        StorageError: The file cannot be read, or holds something else.
    """
    path = folder.tracker_ids_path
    if not path.exists():
        return {}
    with storage_errors("read", path):
        return check_stored(_RunIds, path.read_bytes(), str(path)).root


def read_table(path: Path, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """A stored rollout or evaluation, one row an image, its columns of the types written.

    Numbers are finite, and only targets, scores and notes can be missing. Pictures are named by
    paths below `images/`.

    Args:
        columns: Those to be read, `raw/` and `note/` for all whose names begin so, `sources` where
            there is one; None for all.

    Raises:
        StorageError: The file is missing, is not a whole Parquet file, was not written by this
            version, lacks a column, or holds in one what the run does not write.
    """
    with storage_errors("read", path):
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                _weighing_of(file.schema_arrow, path)
                wanted = _choose(file.schema_arrow.names, columns, path)
                # Tables of a step are small: threads would cost more than they save.
                table = file.read(columns=wanted, use_threads=False)
        except (pyarrow.ArrowException, ValueError) as error:
            raise StorageError(
                f"{path} is not a whole Parquet file ({error}). Remove it, or restore a copy."
            ) from error
    try:
        table = _typed(table)
        _check_values(table, step_of(path))
    except (pyarrow.ArrowException, ValueError) as error:
        raise StorageError(f"{path} is damaged ({error}). {_RESTORE}") from error
    return table


def read_weighing(path: Path) -> Weighing:
    """How the totals of a stored table were weighted.

    Raises:
        StorageError: As `read_table`.
    """
    with storage_errors("read", path):
        try:
            return _weighing_of(pyarrow.parquet.read_schema(path), path)
        except (pyarrow.ArrowException, ValueError) as error:
            raise StorageError(
                f"{path} is not a whole Parquet file ({error}). Remove it, or restore a copy."
            ) from error


def weighing_metadata(weighing: Weighing) -> dict[bytes, bytes]:
    """What the schema of a table carries, so that its totals can be computed again."""
    values = {"schema": SCHEMA, **dataclasses.asdict(weighing)}
    return {METADATA_KEY: json.dumps(values).encode()}


def evaluation_steps(folder: RunFolder) -> list[int]:
    """Policy steps at which held-out prompts were evaluated, in order."""
    return stored_steps(folder.evaluations_dir)


def stored_steps(directory: Path) -> list[int]:
    """Steps of the tables in a folder, in order."""
    steps = (step_of(path) for path in directory.glob("*.parquet"))
    return sorted(step for step in steps if step is not None)


def read_evaluation(
    folder: RunFolder, step: int, columns: Sequence[str] | None = None
) -> pyarrow.Table:
    """The evaluation made at policy step `step`, one row an image, its totals comparable.

    Raises:
        StorageError: There is no such evaluation, its file is damaged, or see
            `with_comparable_totals`.
    """
    path = folder.evaluation_path(step)
    table = read_table(path, columns)
    return with_comparable_totals(folder, path, table) if "total" in table.column_names else table


def with_comparable_totals(folder: RunFolder, path: Path, table: pyarrow.Table) -> pyarrow.Table:
    """A stored evaluation with totals that compare with those of the run's other evaluations.

    Save under `weighted_sum` they are computed from the raw scores and those of step 0, as the run
    computes them: tables written before it did so hold totals that are standardised inside each
    group, whose mean is 0 at every step. Totals of `weighted_sum` are as stored.

    Args:
        folder: The run.
        table: As `read_table` gives it, with the column `total`.

    Raises:
        StorageError: The evaluation of step 0 cannot be read, or its scores give no totals.
    """
    weighing = read_weighing(path)
    if weighing.combine == "weighted_sum":
        return table
    untrained = read_untrained(folder)
    try:
        totals = combine(_read_scores(path), mode=weighing.combine, untrained=untrained)
    except (RewardError, ValueError) as error:
        raise StorageError(f"{path} has no totals ({error}). {_RESTORE}") from error
    column = pyarrow.array(totals.flatten().numpy(), pyarrow.float32())
    return table.set_column(table.column_names.index("total"), "total", column)


def read_untrained(folder: RunFolder) -> RewardTable:
    """Scores of the untrained model on the held-out prompts, one image a row.

    Raises:
        StorageError: There is no evaluation of step 0, or it cannot be read.
    """
    path = folder.evaluation_path(0)
    if not path.exists():
        raise StorageError(
            f"{path} is gone: unless reward.combine is weighted_sum the totals of evaluations "
            "are measured by the spread of its scores. Restore it from a copy."
        )
    return _read_scores(path)


def _read_scores(path: Path) -> RewardTable:
    weighing = read_weighing(path)
    names = tuple(weighing.weights)
    table = read_table(path, [f"{RAW}{name}" for name in names])
    columns = [table[f"{RAW}{name}"] for name in names]
    raw = np.stack([column.fill_null(0.0).to_numpy() for column in columns], axis=1)
    is_valid = np.stack([column.is_valid().to_numpy() for column in columns], axis=1)
    return RewardTable(
        names=names,
        raw=torch.from_numpy(raw).float()[:, None],
        is_applicable=torch.from_numpy(is_valid),
        weights=torch.tensor(list(weighing.weights.values()), dtype=torch.float32),
        std_floors=torch.tensor([weighing.std_floors[name] for name in names], dtype=torch.float32),
    )


def _weighing_of(schema: pyarrow.Schema, path: Path) -> Weighing:
    metadata = schema.metadata or {}
    if METADATA_KEY not in metadata:
        raise StorageError(
            f"{path} has no glm_grpo metadata, so its weights are unknown. Use a table as the run "
            "wrote it."
        )
    content, place = metadata[METADATA_KEY], f"{path}: its metadata"
    version = check_stored(_Version, content, place).version
    if version != SCHEMA:
        raise StorageError(
            f"{path} has schema {version}, and this version reads {SCHEMA}. Use the version of "
            "glm-grpo that wrote the run."
        )
    weighing = Weighing(**check_stored(_Weighing, content, place).model_dump())
    if weighing.std_floors.keys() != weighing.weights.keys():
        raise StorageError(
            f"{place} is damaged (std_floors is of other terms than weights); restore it from a "
            "copy"
        )
    return weighing


def _choose(stored: Sequence[str], columns: Sequence[str] | None, path: Path) -> list[str]:
    """The names of the columns that are asked for."""
    if columns is None:
        return list(stored)
    prefixes = tuple(name for name in columns if name in (RAW, NOTE, SOURCES))
    named = [name for name in columns if name not in prefixes]
    missing = [name for name in named if name not in stored]
    if missing:
        raise StorageError(
            f"{path} has no column {', '.join(missing)}. It does not belong to the run's "
            "config.yaml, or was written by another version: restore the table that the run wrote."
        )
    return [*named, *(name for name in stored if prefixes and name.startswith(prefixes))]


def _typed(table: pyarrow.Table) -> pyarrow.Table:
    """The table with its columns as the recorder writes them.

    Raises:
        ValueError, ArrowException: One holds something else, or nothing for some picture.
    """
    fields = []
    for stored in table.schema:
        name = stored.name
        kind = pyarrow.float32() if name.startswith(RAW) else _COLUMNS.get(name, stored.type)
        kind = pyarrow.string() if name.startswith(NOTE) else kind
        may_lack = name == "target" or name.startswith((RAW, NOTE)) or name not in _COLUMNS
        fields.append(pyarrow.field(name, kind, nullable=may_lack))
    typed = table.cast(pyarrow.schema(fields, table.schema.metadata))
    # Text is not read before: bytes that are no UTF-8 would fail wherever it is used.
    typed.validate(full=True)
    return typed


def _check_values(table: pyarrow.Table, step: int | None) -> None:
    """What a type does not say.

    Raises:
        ValueError: A number is not finite, a list has gaps, a picture lies elsewhere, there is no
            row, or the rows are of another step.
    """
    if table.num_rows == 0:
        raise ValueError("it has no row")
    for field, column in zip(table.schema, table.columns, strict=True):
        values = column
        if pyarrow.types.is_list(field.type) and field.name in _COLUMNS:
            values = pyarrow.compute.list_flatten(column)
            if values.null_count > 0:
                raise ValueError(f"{field.name} lacks a value")
        if pyarrow.types.is_float32(values.type):
            numbers = values.drop_null().to_numpy()
            if not np.isfinite(numbers).all():
                raise ValueError(f"{field.name} holds numbers that are not finite")
        if field.name in _PICTURES:
            for picture in values.drop_null().to_pylist():
                _check_picture(picture)
    if step is not None and "step" in table.column_names:
        others = pyarrow.compute.not_equal(table["step"], step)
        if pyarrow.compute.any(others).as_py():
            raise ValueError(f"step is not {step} in every row")


def _check_picture(name: str) -> None:
    """What leaves the folder of pictures was not written by the run.

    Raises:
        ValueError: It leads elsewhere.
    """
    parts = PurePosixPath(name).parts
    # Two dots may stand in a name, as in that of the id `a..b`.
    if len(parts) < 2 or parts[0] != _IMAGES or ".." in parts or "\0" in name:
        raise ValueError(f"picture {name[:80]!r} is not below {_IMAGES}/")
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"the name of picture {name[:80]!r} is longer than {_LONGEST_NAME}")


def picture_name(stored: str) -> str:
    """The path of a stored picture relative to `images/`."""
    return str(PurePosixPath(stored).relative_to(_IMAGES))
