"""Reading back what a run stored: metrics, rollouts and evaluations.

`glm_grpo.training.recorder` writes them; reports and commands read them here, without a model.
"""

from __future__ import annotations

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
"""Key in the schema metadata of a table; its JSON holds the fields of `Weighing`."""


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


def read_table(path: Path) -> pyarrow.Table:
    """A stored rollout or evaluation, one row an image; `schema.metadata` holds the weights.

    Raises:
        StorageError: The file is missing or is not a whole Parquet file.
    """
    with storage_errors("read", path):
        try:
            return pyarrow.parquet.read_table(path)
        except pyarrow.ArrowInvalid as error:
            raise StorageError(
                f"{path} is not a whole Parquet file ({error}). Remove it, or restore a copy."
            ) from error


def read_weighing(table: pyarrow.Table) -> Weighing:
    """How the totals of a table that `read_table` returned were weighed.

    Raises:
        StorageError: The table was not written by this project.
    """
    metadata = table.schema.metadata or {}
    if METADATA_KEY not in metadata:
        raise StorageError(
            "The table has no glm_grpo metadata, so its weights are unknown. Use a table as the "
            "run wrote it."
        )
    return Weighing(**json.loads(metadata[METADATA_KEY]))


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
