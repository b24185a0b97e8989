"""Reading back what a run stored: metrics, rollouts and evaluations.

`glm_grpo.training.recorder` writes them; reports and commands read them here, without a model.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from glm_grpo.errors import StorageError
from glm_grpo.storage import RunFolder, step_of, storage_errors
from rewards.reweigh import Mode

MetricsRow = dict[str, int | float | None]
"""One line of `metrics.jsonl`: `step` and the metrics; None was not finite."""

METADATA_KEY = b"glm_grpo"
"""Key in the schema metadata of a table; its JSON holds `schema` and the fields of `Weighing`."""

SCHEMA = 2
"""Version of the columns; a table of another version is refused."""


@dataclass(frozen=True)
class Weighing:
    """How the totals of a stored table came from its raw scores.

    Attributes:
        weights: By name of the term.
        std_floors: By name of the term, see `RewardTable`.
        combine: How the weighed terms are combined.
    """

    weights: dict[str, float]
    std_floors: dict[str, float]
    combine: Mode


def read_metrics(folder: RunFolder) -> list[MetricsRow]:
    """All lines of `metrics.jsonl` in order; None stands for a value that was not finite.

    A last line torn by a kill is left out, and a run without metrics gives an empty list.

    Raises:
        StorageError: The file cannot be read, or a line before the last is not a JSON object.
    """
    if not folder.metrics_path.exists():
        return []
    with storage_errors("read", folder.metrics_path):
        text = folder.metrics_path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")
    rows: list[MetricsRow] = []
    # What follows the last line feed is empty, or was being written when the process died.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("not an object")
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"Line {number} of {folder.metrics_path} is {line[:80]!r}: every line must be a "
                "JSON object. Restore the file or remove the line."
            ) from error
        rows.append(row)
    return rows


def read_table(path: Path, columns: list[str] | None = None) -> pyarrow.Table:
    """A stored rollout or evaluation, one row an image; `schema.metadata` holds the weights.

    Args:
        path: Of the table.
        columns: Those to be read; None for all.

    Raises:
        StorageError: The file is missing, is not a whole Parquet file, or was not written by this
            version.
    """
    with storage_errors("read", path):
        try:
            table = pyarrow.parquet.read_table(path, columns=columns)
        except pyarrow.ArrowInvalid as error:
            raise StorageError(
                f"{path} is not a whole Parquet file ({error}). Remove it, or restore a copy."
            ) from error
    check_schema(table.schema, path)
    return table


def weighing_metadata(weighing: Weighing) -> dict[bytes, bytes]:
    """What the schema of a table carries, so that its totals can be computed again."""
    values = {"schema": SCHEMA, **dataclasses.asdict(weighing)}
    return {METADATA_KEY: json.dumps(values).encode()}


def check_schema(schema: pyarrow.Schema, path: Path) -> None:
    """Refuse a table that this version did not write.

    Raises:
        StorageError: The table is of another version, or not of this project.
    """
    metadata = schema.metadata or {}
    if METADATA_KEY not in metadata:
        raise StorageError(
            f"{path} has no glm_grpo metadata, so its weights are unknown. Use a table as the run "
            "wrote it."
        )
    version = json.loads(metadata[METADATA_KEY]).get("schema", 1)
    if version != SCHEMA:
        raise StorageError(
            f"{path} has schema {version}, and this version reads {SCHEMA}. Use the version of "
            "glm-grpo that wrote the run."
        )


def read_weighing(table: pyarrow.Table) -> Weighing:
    """How the totals of a table that `read_table` returned were weighed."""
    values = json.loads(table.schema.metadata[METADATA_KEY])
    del values["schema"]
    return Weighing(**values)


def evaluation_steps(folder: RunFolder) -> list[int]:
    """Policy steps at which held-out prompts were evaluated, in order."""
    steps = (step_of(path) for path in folder.evaluations_dir.glob("*.parquet"))
    return sorted(step for step in steps if step is not None)


def read_evaluation(folder: RunFolder, step: int) -> pyarrow.Table:
    """The evaluation made at policy step `step`, one row an image.

    Raises:
        StorageError: There is no such evaluation, or its file is not whole.
    """
    return read_table(folder.evaluation_path(step))
