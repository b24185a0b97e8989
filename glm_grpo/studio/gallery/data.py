"""Contents of a run's pages as plain values: settings, steps, evaluations, images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from jaxtyping import Float32

from glm_grpo.config import Config
from glm_grpo.errors import CheckpointError, ConfigError, GlmGrpoError, StorageError
from glm_grpo.run.config import read_config, read_config_text
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.provenance import read_provenance
from glm_grpo.run.tables import (
    CREDIT,
    METADATA,
    NOTE,
    OBJECTS,
    PIECES,
    RAW,
    SOURCES,
    MetricsRow,
    SummaryRow,
    Weighing,
    evaluation_steps,
    image_name,
    read_bands,
    read_metrics,
    read_table,
    read_weighing,
    stored_steps,
)
from glm_grpo.studio.gallery.objects import mark_objects, read_asked
from glm_grpo.studio.gallery.pace import pace
from glm_grpo.studio.gallery.readings import read_letters
from rewards.score_map import ScoreBox, like_with_like
from rewards.terms.ocr import OCR, OcrConfig
from rewards.terms.text_matching import plain_form

Problem = dict[str, str]
"""`where`: the file; `message`: the problem and its remedy."""

Group = dict[str, Any]
"""One prompt's images with everything stored about them, as JSON values."""

EVALUATION_COLUMNS = (
    *("step", "prompt_id", "prompt", "texts", "decode_seed", "target", "total", "image"),
    *(RAW, NOTE, OBJECTS, METADATA, SOURCES),
)
_IS_ZERO_STD = "is_flat"
"""Column of zero-std groups, as runs store it."""
ROLLOUT_COLUMNS = (*EVALUATION_COLUMNS, "penalty", "advantage", _IS_ZERO_STD)
CREDIT_COLUMNS = ("prompt_id", "image", "total", CREDIT, PIECES)
_NUMBERS = ("total", "penalty", "advantage")

_MISSING = "numbers are missing or not finite for some images of a prompt"

SCHEMA = 3
"""Version of the data files, for scripts that read them."""
_CHUNK_STEPS = 10
_LEAST_SCALE = 0.25
"""Of the largest credit of a step: colours of groups in which hardly anything differs stay pale."""

_LEAST_SHARE = 0.95
"""Of what the boxes of its kind earn on average: one that earns less is marked as a loss."""

_OVERVIEW = ("reward/mean", "reward/std", "eval/total", "canary/departures")
"""Metrics of all steps that the first page shows before any other file is loaded."""


def describe(error: GlmGrpoError, folder: RunFolder) -> str:
    """Text of an error with paths relative to the run: a shared gallery names no machine."""
    return str(error).replace(f"{folder.path}/", "")


@dataclass(frozen=True)
class Settings:
    """What the pages need to know in addition to the records.

    Attributes:
        values: `reward`, `advantage`, `group_size`, `image_size`, `steps_planned`, `is_sampled`,
            `canary_margin`, `label` and `config`, as in `run.js`.
        readers: OCR terms by name, and whether they are case-sensitive.
        problems: Reasons why something is missing.
        eval_every: Steps between evaluations, if known.
    """

    values: Mapping[str, Any]
    readers: Mapping[str, bool]
    problems: tuple[Problem, ...]
    eval_every: int | None = None


def read_settings(folder: RunFolder) -> Settings:
    """Read the settings of a run; if its config cannot be read, infer them from its tables."""
    text = None
    try:
        text = read_config_text(folder)
        config = read_config(folder)
    except (CheckpointError, ConfigError, StorageError) as error:
        problem = {"where": folder.config_path.name, "message": describe(error, folder)}
        return _from_tables(folder, text, problem)
    values = _from_config(config, text)
    if is_of_base(folder):
        values["steps_planned"] = None
    return Settings(values, list_readers(config), (), config.train.eval_every)


def is_of_base(folder: RunFolder) -> bool:
    """Whether `glm-grpo eval` evaluated the base model here, so that no step will follow."""
    try:
        provenance = read_provenance(folder)
    except StorageError:
        return False
    return provenance is not None and not provenance.training and evaluation_steps(folder) == [0]


def _from_config(config: Config, text: str) -> dict[str, Any]:
    reward, rollout = config.reward, config.rollout
    weights = reward.weights()
    kinds = {name: term["kind"] for name, term in reward.model_dump()["terms"].items()}
    return {
        "reward": {
            "combine": reward.combine,
            "terms": [
                _term(name, kinds[name], weights[name], term.std_floor)
                | {"is_for_evaluations": term.when == "evaluation"}
                for name, term in reward.terms.items()
            ],
            "watch": list(reward.watch),
        },
        "advantage": config.advantage.model_dump(),
        "group_size": rollout.group_size,
        "image_size": {"width": rollout.width, "height": rollout.height},
        "steps_planned": config.train.steps,
        "is_sampled": config.train.method == "grpo",
        "canary_margin": reward.canary_margin,
        "label": config.run.model_dump(mode="json"),
        "config": text,
    }


def list_readers(config: Config) -> dict[str, bool]:
    """OCR terms by name, and whether they are case-sensitive."""
    return {
        name: term.case_sensitive
        for name, term in config.reward.terms.items()
        if isinstance(term, OcrConfig)
    }


def _from_tables(folder: RunFolder, text: str | None, problem: Problem) -> Settings:
    weighing = _first_weighing(folder)
    # A term that is used once has the name of its kind.
    terms = [
        _term(name, name, _decimal(weight), _decimal(weighing.std_floors[name]))
        for name, weight in weighing.weights.items()
    ]
    values = {
        "reward": {
            "combine": weighing.combine,
            "terms": terms,
            "watch": [],
        },
        "advantage": None,
        "group_size": None,
        "image_size": None,
        "steps_planned": None,
        "is_sampled": True,
        "canary_margin": None,
        "label": None,
        "config": text,
    }
    readers = {OCR: False} if OCR in weighing.weights else {}
    return Settings(values, readers, (problem,))


def _first_weighing(folder: RunFolder) -> Weighing:
    """How the first readable table was weighted; without terms if there is none."""
    for directory in (folder.rollouts_dir, folder.evaluations_dir):
        for path in sorted(directory.glob("step-*.parquet")):
            try:
                return read_weighing(path)
            except StorageError:
                continue
    return Weighing({}, {}, "weighted_sum")


def _term(name: str, kind: str, weight: float, std_floor: float) -> dict[str, Any]:
    return {"name": name, "kind": kind, "weight": weight, "std_floor": std_floor}


def _decimal(value: float) -> float:
    """Shortest decimal that restores a 32-bit number, as it was written in the config."""
    return float(str(np.float32(value)))


def read_groups(
    path: Path, columns: Sequence[str], readers: Mapping[str, bool]
) -> tuple[Group, ...]:
    """Read the groups of a stored rollout or evaluation, in stored order.

    Numbers become the shortest decimals that restore the stored 32-bit values.

    Args:
        columns: `ROLLOUT_COLUMNS` or `EVALUATION_COLUMNS`.
        readers: Terms whose notes are OCR readings, and whether they are case-sensitive.
    """
    table = read_table(path, columns)
    try:
        return tuple(_groups(table, readers))
    except ValueError as error:
        raise StorageError(f"{path} is damaged ({error}). Restore a copy.") from error


def image_paths_of(groups: Sequence[Group]) -> Iterator[str]:
    """Paths, relative to `images/`, of all images, targets and sources of groups."""
    for group in groups:
        yield from group["images"]
        if group["target"] is not None:
            yield group["target"]
        yield from group.get("sources", ())


def _groups(table: pyarrow.Table, readers: Mapping[str, bool]) -> Iterator[Group]:
    columns: dict[str, Any] = {
        field.name: _floats(column) if field.type == pyarrow.float32() else column.to_pylist()
        for field, column in zip(table.schema, table.columns, strict=True)
    }
    applies = {name: table[name].is_valid().to_numpy() for name in columns if name.startswith(RAW)}
    for rows in _rows_by_prompt(columns["prompt_id"]):
        group = {name: column[rows] for name, column in columns.items()}
        for name, is_valid in applies.items():
            if not is_valid[rows].any():
                group[name] = None
            elif not is_valid[rows].all():
                raise ValueError(_MISSING)
        yield _group(group, readers)


def _rows_by_prompt(prompt_ids: Sequence[str]) -> Iterator[slice]:
    for _, rows in itertools.groupby(range(len(prompt_ids)), prompt_ids.__getitem__):
        first, *others = rows
        yield slice(first, first + 1 + len(others))


def _group(columns: Mapping[str, Any], readers: Mapping[str, bool]) -> Group:
    """Build a group from the columns of its rows; None for scores of terms that do not apply."""
    prompt_id, texts = columns["prompt_id"][0], columns["texts"][0]
    raw, notes = {}, {}
    for name, column in columns.items():
        if name.startswith(RAW):
            raw[name.removeprefix(RAW)] = None if column is None else _decimals(column)
        elif name.startswith(NOTE) and any(note is not None for note in column):
            term = name.removeprefix(NOTE)
            notes[term] = [_note(note or "", texts, readers.get(term)) for note in column]
    asked = read_asked(columns.get(METADATA, [None])[0])
    found = {
        name.removeprefix(OBJECTS): _found(column, asked, columns.get(_note_of(name)))
        for name, column in columns.items()
        if name.startswith(OBJECTS) and column[0] is not None
    }
    group = {
        "prompt_id": prompt_id,
        "prompt": columns["prompt"][0],
        "texts": texts,
        "target": None if columns["target"][0] is None else image_name(columns["target"][0]),
        # A string, because JavaScript numbers are exact up to 53 bits, and seeds have 64.
        "decode_seed": str(columns["decode_seed"][0]),
        "images": [image_name(name) for name in columns["image"]],
        "raw": raw,
        "notes": notes,
    }
    # Runs whose prompts ask for objects.
    group |= {"asked": asked} if asked else {}
    group |= {"found": found} if found else {}
    if SOURCES in columns:
        group["sources"] = [image_name(name) for name in columns[SOURCES][0]]
    group |= {name: _decimals(columns[name]) for name in _NUMBERS if name in columns}
    if _IS_ZERO_STD in columns:
        group["is_zero_std"] = columns[_IS_ZERO_STD][0]
    return group


def _floats(column: pyarrow.ChunkedArray) -> Float32[np.ndarray, " rows"]:
    """Convert a column of numbers; NaN where values are missing."""
    return np.asarray(column.to_numpy(), dtype=np.float32)


def _decimals(values: Float32[np.ndarray, " rows"]) -> list[float | None]:
    """Shortest decimals that restore 32-bit numbers; None for NaN, an image without a score.

    Raises:
        ValueError: A number is infinite.
    """
    if np.isinf(values).any():
        raise ValueError(_MISSING)
    return [None if text == "nan" else float(text) for text in values.astype(str)]


def _note(note: str, texts: Sequence[str], is_case_sensitive: bool | None) -> Any:
    """A term's note on an image: the text, or for OCR terms its letters, marked right or wrong."""
    if is_case_sensitive is None:
        return note
    read = plain_form(note)
    reading = read_letters(read, texts, is_case_sensitive=is_case_sensitive)
    return {"read": read, "marks": reading.marks, "missing": reading.missing}


def _note_of(objects: str) -> str:
    """Column of the notes of the term that a column of objects belongs to."""
    return NOTE + objects.removeprefix(OBJECTS)


def _found(
    images: Sequence[Sequence[str]], asked: Sequence[str], notes: Sequence[str | None] | None
) -> list[dict[str, Any]]:
    """Objects that a term found in each image, in the form of an OCR reading."""
    notes = notes or [None] * len(images)
    return [
        {"read": ", ".join(found), "marks": mark_objects(found, asked, note), "missing": ""}
        for found, note in zip(images, notes, strict=True)
    ]


@dataclass(frozen=True)
class RunContents:
    """Everything that a run has recorded, except images and scores.

    Attributes:
        metrics: Metrics by step; step 0 is the evaluation before the first step.
        bands: Bands of the canaries; None if there are none.
        chunks: Key of a data file -> its steps in order, those with a rollout or metrics. Step 0 is
            in the first file and in no list.
        evaluations: Policy steps with an evaluation, in order.
        problems: Files that could not be read.
    """

    folder: RunFolder
    settings: Settings
    metrics: Mapping[int, MetricsRow]
    bands: Mapping[str, Any] | None
    chunks: Mapping[str, tuple[int, ...]]
    evaluations: tuple[int, ...]
    problems: tuple[Problem, ...]


def read_records(folder: RunFolder) -> RunContents:
    """Read the records of a run folder; whatever cannot be read becomes a problem."""
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
    return RunContents(
        folder=folder,
        settings=settings,
        metrics=dict(sorted(rows.items())),
        bands=None if bands is None else {name: asdict(band) for name, band in bands.items()},
        chunks=_chunks({*rows, *stored_steps(folder.rollouts_dir)}),
        evaluations=tuple(evaluation_steps(folder)),
        problems=tuple(problems),
    )


def chunk_key(step: int) -> str:
    """Name of the data file that contains a step."""
    first = max(step - 1, 0) // _CHUNK_STEPS * _CHUNK_STEPS + 1
    return f"steps-{first:06d}"


def credit_key(step: int) -> str:
    """Name of the data file of what the places of a training step's images earned."""
    return f"credit-{step:06d}"


def evaluation_key(step: int) -> str:
    """Name of the data file of the evaluation at a policy step."""
    return f"evaluation-{step:06d}"


def run_data(records: RunContents, summary: Sequence[SummaryRow] = ()) -> dict[str, Any]:
    """Data of the whole run: its settings, its progress, and the list of data files.

    Args:
        summary: Comparison of before and after for the last evaluation; may be empty. Rows with a
            value that is not finite are left out.
    """
    return {
        "schema": SCHEMA,
        "name": " / ".join(records.folder.path.absolute().parts[-2:]),
        **records.settings.values,
        "evaluations": [
            {"step": step, "key": evaluation_key(step)} for step in records.evaluations
        ],
        "chunks": [{"key": key, "steps": list(steps)} for key, steps in records.chunks.items()],
        "bands": records.bands,
        "overview": _overview(records),
        "summary": [_summary_row(row) for row in summary if _is_finite(row)],
        "problems": list(records.problems),
        **pace(
            records.folder,
            records.metrics,
            steps=records.settings.values["steps_planned"],
            eval_every=records.settings.eval_every,
        ),
    }


def _is_finite(row: SummaryRow) -> bool:
    """Whether a page can show a row: JSON only has finite numbers, but scores may overflow."""
    return all(map(math.isfinite, (row.before, row.after, row.difference)))


def _summary_row(row: SummaryRow) -> dict[str, Any]:
    """A row for the page; the ends of an interval that there is not are None."""
    return asdict(row) | ({} if math.isfinite(row.low) else {"low": None, "high": None})


def _overview(records: RunContents) -> dict[str, Any]:
    """Steps and columns of a few metrics; None where a value is missing or not finite."""
    metrics, bands = records.metrics, records.bands or {}
    of_evaluations = (f"canary/{name}" for name in bands if bands[name]["is_of_evaluations"])
    columns = {
        name: [row.get(name) for row in metrics.values()]
        for name in (*_OVERVIEW, *of_evaluations)
        if any(row.get(name) is not None for row in metrics.values())
    }
    return {"steps": list(metrics), "values": columns}


def steps_data(records: RunContents, key: str) -> dict[str, Any]:
    """Data of one chunk of steps: their metrics and their groups."""
    folder = records.folder
    # Supervised fine-tuning has no groups.
    sampled = records.chunks[key] if records.settings.values["is_sampled"] else ()
    return {
        "metrics": [row for step, row in records.metrics.items() if chunk_key(step) == key],
        "steps": [
            _entry(records, step, folder.rollout_path(step), ROLLOUT_COLUMNS) for step in sampled
        ],
    }


def credit_data(records: RunContents, step: int) -> dict[str, Any] | None:
    """What places and pieces of the images of a step earned; None with credit by image.

    Groups go by their first image. The credit of places is whole numbers of a `unit` that leaves
    the largest of the group three digits: a large image has 1,024 of them. The `scale` is the
    credit of the strongest colour.

    Boxes of one object, such as its colour and its position, are one piece. It is a gain if it
    raises the score, and not by clearly less than its like does.

    Returns:
        `{image: {"unit": reward per 1, "scale": units, "places": [image][row][column], "pieces":
        {term: [image][piece] of text, is it a gain, left, top, right, bottom, parts}}}`, edges in
        pixels. `parts` are a word for each kind, and the part of the term's score that was earned,
        less the mean of the kind in the group.
    """
    try:
        table = read_table(records.folder.rollout_path(step), CREDIT_COLUMNS)
    except StorageError:
        # The data of the step say so.
        return None
    if CREDIT not in table.column_names:
        return None
    columns = table.to_pydict()
    groups = [
        (rows, np.array(columns[CREDIT][rows], dtype=np.float64))
        for rows in _rows_by_prompt(columns["prompt_id"])
    ]
    least_scale = _LEAST_SCALE * max(np.abs(credit).max() for _, credit in groups)
    data = {}
    for rows, credit in groups:
        largest = np.abs(credit).max()
        digits = 2 - math.floor(math.log10(largest)) if largest else 0
        data[image_name(columns["image"][rows.start])] = {
            "unit": float(f"1e{-digits}"),
            "scale": round(max(largest, least_scale) * 10.0**digits),
            "places": np.rint(credit * 10.0**digits).astype(int).tolist(),
            "pieces": {
                name.removeprefix(PIECES): _pieces(column[rows], columns["total"][rows])
                for name, column in columns.items()
                if name.startswith(PIECES) and column[rows.start] is not None
            },
        }
    return data


def _pieces(
    stored: Sequence[Sequence[Mapping[str, Any]]], totals: Sequence[float]
) -> list[list[list[Any]]]:
    """Pieces of each image of a group."""
    boxes = tuple(tuple(ScoreBox(**box) for box in found) for found in stored)
    # As in the step itself, an image without a total is in no mean.
    is_scored = [not math.isnan(total) for total in totals]
    compared = like_with_like(boxes, is_scored)
    return [list(_pieces_of(*both)) for both in zip(boxes, compared, strict=True)]


def _pieces_of(boxes: Sequence[ScoreBox], compared: Sequence[ScoreBox]) -> Iterator[list[Any]]:
    """Pieces of one image, from its boxes, and those of a kind less the mean of it."""
    differences = iter(compared)
    objects: dict[tuple[Any, ...], list[tuple[ScoreBox, float]]] = {}
    for box in boxes:
        centred = next(differences, None) if box.kind else None
        key = (box.text, box.left, box.top, box.right, box.bottom)
        objects.setdefault(key, []).append((box, 0.0 if centred is None else centred.value))
    for (text, *edges), parts in objects.items():
        value = math.fsum(box.value for box, _ in parts)
        usual = value - math.fsum(difference for _, difference in parts)
        by_word: dict[str, float] = {}
        for box, difference in parts:
            if box.kind:
                word = box.kind.partition(":")[0]
                by_word[word] = by_word.get(word, 0.0) + difference
        is_gain = value > 0 and value >= _LEAST_SHARE * usual
        rounded = [[word, round(gained, 4)] for word, gained in by_word.items()]
        yield [plain_form(text), is_gain, *(round(edge, 1) for edge in edges), rounded]


def evaluation_data(records: RunContents, step: int) -> dict[str, Any]:
    """Data of one evaluation of the held-out prompts."""
    path = records.folder.evaluation_path(step)
    return _entry(records, step, path, EVALUATION_COLUMNS)


def image_paths_in(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Paths, relative to `images/`, of all images in readable steps or evaluations."""
    for entry in entries:
        yield from image_paths_of(entry.get("groups", ()))


def _entry(records: RunContents, step: int, path: Path, columns: Sequence[str]) -> dict[str, Any]:
    try:
        groups = read_groups(path, columns, records.settings.readers)
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
