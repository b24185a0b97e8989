"""Read what a run stored: metrics, tables, bands of canaries, and tracker run ids.

Each kind of file has one schema here. Content that does not fit it is a `StorageError` that names
the file and the field. `glm_grpo.run.writing` writes the files; reports and commands read them
here, without a model. `glm_grpo.run.config` reads `config.yaml`, `glm_grpo.run.checkpoints` reads
checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from jaxtyping import Bool, Float32
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from glm_grpo.config.renamed import new_metric
from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder, step_of, storage_errors
from rewards.canaries import Band
from rewards.types import RewardTable
from rewards.weighting import Mode

MetricsRow = dict[str, int | float | None]
"""`step` and its metrics; None stands for a value not finite."""

METADATA_KEY = b"glm_grpo"
"""Key in the schema metadata of a table; its JSON holds `schema` and the fields of `Weighing`."""

SCHEMA = 2
"""Version of the columns; a table of another version is refused."""

RAW = "raw/"
"""Prefix of score columns, one per term: null if a term does not apply, NaN if it refused an image.
The total of an image that a term with a weight refused is NaN."""
NOTE = "note/"
"""Prefix of note columns, one per term with notes; null if it has none for an image."""
OBJECTS = "objects/"
"""Prefix of columns of what was found in images, in words, one per term that looks for objects;
null if it does not apply."""
CREDIT = "credit"
"""Column of what each place of an image earned more than its group; only with credit by place."""
PIECES = "pieces/"
"""Prefix of columns of pieces of the score, one per term that has them; only with credit by place.
Null if a term does not apply."""
METADATA = "metadata"
"""Column of the metadata of prompts, as JSON; only if a prompt of the step has any."""
SOURCES = "sources"
"""Column of the source images' paths; only editing runs have it."""

_MAY_BE_ABSENT = (RAW, NOTE, OBJECTS, CREDIT, PIECES, METADATA, SOURCES)
"""Prefixes, and columns that not every table has."""
_IMAGES = "images"

_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)

Schema = TypeVar("Schema")


@dataclass(frozen=True)
class SummaryRow:
    """One term, or the total, before and after training on the held-out prompts.

    Attributes:
        name: Name of the term, or `total`.
        before: Mean of the first evaluation.
        after: Mean of the last evaluation.
        difference: Mean of after - before, paired by prompt.
        low: Lower end of the 95 % interval of the difference; NaN where prompts are too few, as
            `high`.
    """

    name: str
    before: float
    after: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Weighing:
    """How the totals of a stored table came from its raw scores.

    Under `weighted_sum` these values are sufficient; otherwise an evaluation's totals also depend
    on the evaluation of step 0, see `read_base_scores`.

    Attributes:
        weights: Weight by term name.
        std_floors: Standard-deviation floor by term name, see `RewardTable`.
        combine: How the weighted terms are combined.
    """

    weights: dict[str, float]
    std_floors: dict[str, float]
    combine: Mode


def check_stored(schema: type[Schema], content: str | bytes, place: str) -> Schema:
    """Validate a JSON text of a run folder.

    Args:
        schema: Any type that pydantic supports.
        content: JSON text.
        place: File, or file and line, for the error.
    """
    try:
        found: Schema = _adapter(schema).validate_json(content)
    except ValidationError as error:
        raise StorageError(
            f"{place} is damaged ({describe_misfit(error)}); restore it from a copy"
        ) from error
    return found


def describe_misfit(error: ValidationError) -> str:
    """Describe the first field that does not fit: its value and the rule."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part)[:80] for part in first["loc"]) or "the whole"
    return f"{field} is {first['input']!r:.80}: {first['msg']}"


def read_metrics(folder: RunFolder) -> list[MetricsRow]:
    """Read the metrics of all steps in order, one row each; empty for a run without metrics.

    The lines of a step are joined: its own, and that of its evaluation, whose values replace
    earlier ones of the same name. Runs of versions up to 0.2 have a single line per step, and other
    names for some metrics.
    """
    rows: dict[int, MetricsRow] = {}
    for line in read_metrics_lines(folder):
        row = rows.setdefault(int(line["step"] or 0), {})
        row.update({new_metric(name): value for name, value in line.items()})
    return list(rows.values())


def read_metrics_lines(folder: RunFolder) -> list[MetricsRow]:
    """Read the lines of `metrics.jsonl` in order, without a last one that a kill cut off."""
    path = folder.metrics_path
    if not path.exists():
        return []
    with storage_errors("read", path):
        lines = path.read_bytes().split(b"\n")
    # What follows the last line feed is empty, or a line cut off by a kill.
    return [
        check_stored(MetricsRow, line, f"line {number} of {path}")
        for number, line in enumerate(lines[:-1], start=1)
    ]


def read_bands(folder: RunFolder) -> dict[str, Band] | None:
    """Read the bands of the canaries; None if the run has stored none."""
    return _read_json(dict[str, Band], folder.canaries_path)


def read_run_ids(folder: RunFolder) -> dict[str, str]:
    """Read the run ids of the trackers, by tracker name."""
    return _read_json(dict[str, str], folder.tracker_ids_path) or {}


def _read_json(schema: type[Schema], path: Path) -> Schema | None:
    if not path.exists():
        return None
    with storage_errors("read", path):
        return check_stored(schema, path.read_bytes(), str(path))


def read_table(path: Path, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """Read a stored rollout or evaluation, one row per image.

    Args:
        columns: Columns to read: a name; `raw/`, `note/`, `objects/` or `pieces/` for all columns
            with that prefix; `sources`, `metadata` or `credit` if it exists; None for all.
    """
    with _parquet_errors(path), pyarrow.parquet.ParquetFile(path) as file:
        _weighing_of(file.schema_arrow, path)
        wanted = _choose(file.schema_arrow.names, columns, path)
        # A step's tables are small, so threads would cost more than they save.
        return file.read(columns=wanted, use_threads=False)


def read_weighing(path: Path) -> Weighing:
    """Read how the totals of a stored table were computed."""
    with _parquet_errors(path):
        return _weighing_of(pyarrow.parquet.read_schema(path), path)


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    with storage_errors("read", path):
        try:
            yield
        except (pyarrow.ArrowException, ValueError) as error:
            raise StorageError(
                f"{path} is not a complete Parquet file ({error}). Remove it, or restore a copy."
            ) from error


def weighing_metadata(weighing: Weighing) -> dict[bytes, bytes]:
    """Metadata for a table's schema from which its totals can be recomputed."""
    values = {"schema": SCHEMA, **dataclasses.asdict(weighing)}
    return {METADATA_KEY: json.dumps(values).encode()}


def evaluation_steps(folder: RunFolder) -> list[int]:
    """Policy steps of the stored evaluations, in order."""
    return stored_steps(folder.evaluations_dir)


def stored_steps(directory: Path) -> list[int]:
    """Steps of the tables in a folder, in order."""
    steps = (step_of(path) for path in directory.glob("*.parquet"))
    return sorted(step for step in steps if step is not None)


def read_evaluation(
    folder: RunFolder, step: int, columns: Sequence[str] | None = None
) -> pyarrow.Table:
    """Read the evaluation at policy step `step`, as `read_table` does."""
    return read_table(folder.evaluation_path(step), columns)


def read_base_scores(folder: RunFolder) -> RewardTable:
    """Read the base model's scores on the held-out prompts, one image per row."""
    path = folder.evaluation_path(0)
    if not path.exists():
        raise StorageError(
            f"{path} is missing: unless reward.combine is weighted_sum, the totals of evaluations "
            "are scaled by the spread of its scores. Restore it from a copy."
        )
    weighing = read_weighing(path)
    names = tuple(weighing.weights)
    raw, applies = raw_scores(read_table(path, [f"{RAW}{name}" for name in names]), names)
    return RewardTable(
        names=names,
        raw=raw[:, None],
        is_applicable=applies,
        weights=torch.tensor(list(weighing.weights.values()), dtype=torch.float32),
        std_floors=torch.tensor([weighing.std_floors[name] for name in names], dtype=torch.float32),
    )


def raw_scores(
    table: pyarrow.Table, names: Sequence[str]
) -> tuple[Float32[Tensor, "N R"], Bool[Tensor, "N R"]]:
    """Scores of terms, 0 where one does not apply to an image, and whether it applies."""
    columns = [table[f"{RAW}{name}"] for name in names]
    raw = np.stack([column.fill_null(0.0).to_numpy() for column in columns], axis=1)
    is_valid = np.stack([column.is_valid().to_numpy() for column in columns], axis=1)
    return torch.from_numpy(raw), torch.from_numpy(is_valid)


def _weighing_of(schema: pyarrow.Schema, path: Path) -> Weighing:
    metadata = schema.metadata or {}
    if METADATA_KEY not in metadata:
        raise StorageError(
            f"{path} has no glm_grpo metadata, so its weights are unknown. Use a table as the run "
            "wrote it."
        )
    content, place = metadata[METADATA_KEY], f"{path}: its metadata"
    # The first version did not store it.
    version = check_stored(dict[str, Any], content, place).get("schema", 1)
    if version != SCHEMA:
        raise StorageError(
            f"{path} has schema {version}, and this version reads {SCHEMA}. Use the version of "
            "glm-grpo that wrote the run."
        )
    return check_stored(Weighing, content, place)


def _choose(stored: Sequence[str], columns: Sequence[str] | None, path: Path) -> list[str]:
    """Names of the requested columns."""
    if columns is None:
        return list(stored)
    prefixes = tuple(name for name in columns if name in _MAY_BE_ABSENT)
    named = [name for name in columns if name not in prefixes]
    missing = [name for name in named if name not in stored]
    if missing:
        raise StorageError(
            f"{path} has no column {', '.join(missing)}. It does not belong to the run's "
            "config.yaml, or was written by another version: restore the table that the run wrote."
        )
    return [*named, *(name for name in stored if prefixes and name.startswith(prefixes))]


def image_name(stored: str) -> str:
    """Path of a stored image relative to `images/`."""
    return str(PurePosixPath(stored).relative_to(_IMAGES))
