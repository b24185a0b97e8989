"""What the pages show, as plain values: the run as a whole, its steps by tens, its evaluations.

A table that is missing, damaged or of another version is an entry that says so; the rest is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm_grpo.errors import StorageError
from glm_grpo.gallery.groups import (
    EVALUATION_COLUMNS,
    ROLLOUT_COLUMNS,
    pictures_of,
    read_groups,
)
from glm_grpo.gallery.problems import Problem, describe
from glm_grpo.gallery.settings import Settings, read_settings
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import MetricsRow, evaluation_steps, read_bands, read_metrics, stored_steps

SCHEMA = 1
"""Version of the data files, for the scripts that read them."""
_CHUNK_STEPS = 10


@dataclass(frozen=True)
class Records:
    """What a run has recorded, pictures and scores aside.

    Attributes:
        folder: The run.
        settings: Of the run.
        metrics: By step; step 0 is the evaluation before the first.
        bands: Of the canaries; None without.
        chunks: Key of a data file -> its steps in order, those with a rollout or metrics. Step 0
            is in the first file and in no list.
        evaluations: Policy steps, in order.
        problems: Files that could not be read.
    """

    folder: RunFolder
    settings: Settings
    metrics: Mapping[int, MetricsRow]
    bands: Mapping[str, Any] | None
    chunks: Mapping[str, tuple[int, ...]]
    evaluations: tuple[int, ...]
    problems: tuple[Problem, ...]


def read_records(folder: RunFolder) -> Records:
    """Look through a run folder; what cannot be read there becomes a problem."""
    settings = read_settings(folder)
    problems = list(settings.problems)
    rows: dict[int, MetricsRow] = {}
    bands = None
    try:
        rows = {int(row["step"] or 0): row for row in read_metrics(folder)}
    except StorageError as error:
        problems.append(_problem(folder.metrics_path, error, folder))
    try:
        bands = read_bands(folder)
    except StorageError as error:
        problems.append(_problem(folder.canaries_path, error, folder))
    return Records(
        folder=folder,
        settings=settings,
        metrics=dict(sorted(rows.items())),
        bands=None if bands is None else {name: asdict(band) for name, band in bands.items()},
        chunks=_chunks({*rows, *stored_steps(folder.rollouts_dir)}),
        evaluations=tuple(evaluation_steps(folder)),
        problems=tuple(problems),
    )


def chunk_key(step: int) -> str:
    """Name of the data file that holds a step."""
    first = max(step - 1, 0) // _CHUNK_STEPS * _CHUNK_STEPS + 1
    return f"steps-{first:06d}"


def evaluation_key(step: int) -> str:
    """Name of the data file of the evaluation made at a policy step."""
    return f"evaluation-{step:06d}"


def run_data(records: Records) -> dict[str, Any]:
    """The run as a whole: its settings, and which data files there are."""
    return {
        "schema": SCHEMA,
        "name": " / ".join(records.folder.path.absolute().parts[-2:]),
        **records.settings.values,
        "evaluations": [
            {"step": step, "key": evaluation_key(step)} for step in records.evaluations
        ],
        "chunks": [{"key": key, "steps": list(steps)} for key, steps in records.chunks.items()],
        "bands": records.bands,
        "problems": list(records.problems),
    }


def steps_data(records: Records, key: str) -> dict[str, Any]:
    """One chunk of steps: their metrics and their groups."""
    folder = records.folder
    return {
        "metrics": [row for step, row in records.metrics.items() if chunk_key(step) == key],
        "steps": [
            _entry(records, step, folder.rollout_path(step), ROLLOUT_COLUMNS)
            for step in records.chunks[key]
        ],
    }


def evaluation_data(records: Records, step: int) -> dict[str, Any]:
    """One evaluation of the held-out prompts."""
    folder = records.folder
    path = folder.evaluation_path(step)
    return _entry(records, step, path, EVALUATION_COLUMNS, evaluated=folder)


def pictures_in(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Paths, relative to `images/`, of all pictures of steps or evaluations that could be read."""
    for entry in entries:
        yield from pictures_of(entry.get("groups", ()))


def _entry(
    records: Records,
    step: int,
    path: Path,
    columns: Sequence[str],
    *,
    evaluated: RunFolder | None = None,
) -> dict[str, Any]:
    try:
        groups = read_groups(path, columns, records.settings.readers, evaluated=evaluated)
        for picture in pictures_of(groups):
            # The page would show what a link leads to.
            records.folder.picture(f"images/{picture}")
    except StorageError as error:
        return {"step": step, "problem": describe(error, records.folder)}
    return {"step": step, "groups": groups}


def _problem(path: Path, error: StorageError, folder: RunFolder) -> Problem:
    return {"where": path.name, "message": describe(error, folder)}


def _chunks(steps: set[int]) -> dict[str, tuple[int, ...]]:
    chunks: dict[str, tuple[int, ...]] = {}
    for step in sorted(steps):
        own = (step,) if step > 0 else ()
        chunks[chunk_key(step)] = chunks.get(chunk_key(step), ()) + own
    return chunks
