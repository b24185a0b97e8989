"""Write the page "before and after": settings of a run, changes of scores, and three prompts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any
from urllib.parse import quote, urlencode

from glm_grpo.config import EMBEDDED_MODELS, Config
from glm_grpo.errors import CheckpointError, ConfigError, StorageError
from glm_grpo.output import without_folders
from glm_grpo.run.config import read_config, read_config_text
from glm_grpo.run.figures import (
    NO_VALUE,
    Cell,
    Table,
    Tone,
    change_row,
    interval,
    interval_note,
    show_change,
    show_score,
)
from glm_grpo.run.folder import RunFolder, write_atomically
from glm_grpo.run.tables import (
    METADATA,
    NOTE,
    OBJECTS,
    RAW,
    SOURCES,
    SummaryRow,
    evaluation_steps,
    image_name,
    read_evaluation,
)
from glm_grpo.studio.gallery.data import describe, list_readers
from glm_grpo.studio.gallery.objects import mark_objects, read_asked
from glm_grpo.studio.gallery.pages import render_page
from glm_grpo.studio.gallery.readings import read_letters
from glm_grpo.studio.gallery.report import SMALL_WIDTH, PromptTiles, Report, Tile
from glm_grpo.studio.held_out.tables import conditions_table, report_held_out, score_tables
from rewards.base import ComparingConfig, TermConfig
from rewards.terms.aesthetic import AestheticConfig
from rewards.terms.lpips import LpipsConfig
from rewards.terms.text_matching import plain_form

_COLUMNS = (
    *("step", "prompt_id", "prompt", "texts", "decode_seed", "target", "total", "image"),
    *(RAW, NOTE, OBJECTS, METADATA, SOURCES),
)

_Row = dict[str, Any]

_EMBEDDED_WEIGHTS = "pkg://glm_grpo/tiny/"


@dataclass(frozen=True)
class Case:
    """One held-out prompt, chosen by how much it changed.

    Attributes:
        heading: Why it was chosen.
        change: Mean total of the last evaluation minus that of the first.
        decode_seed: Seed of the initial noise of all its images.
        tiles: Sources, target, every sample before, and the same after.
    """

    heading: str
    change: float
    decode_seed: int
    tiles: PromptTiles


def choose_cases(changes: Mapping[str, float]) -> dict[str, str]:
    """Choose the prompts to show by rule: best, median and worst change.

    Of an even number, the median is the worse one of the two in the middle. Two prompts have no
    median.

    Args:
        changes: Changes by prompt id.

    Returns:
        Prompt ids by heading.
    """
    ordered = sorted(changes, key=lambda prompt_id: changes[prompt_id], reverse=True)
    if not ordered:
        return {}
    if len(ordered) == 1:
        return {"The only prompt": ordered[0]}
    middle = {"Median change": ordered[len(ordered) // 2]} if len(ordered) > 2 else {}
    return {"Best change": ordered[0], **middle, "Worst change": ordered[-1]}


def read_cases(
    folder: RunFolder, steps: Sequence[int], readers: Mapping[str, bool]
) -> tuple[tuple[Case, ...], int, str | None]:
    """Read the chosen prompts, the number of prompts in both evaluations, and a problem if any.

    Args:
        readers: OCR terms by name, and whether they are case-sensitive.
    """
    if len(steps) < 2:
        return (), 0, None
    try:
        before, after = (_rows_by_prompt(folder, step) for step in (steps[0], steps[-1]))
    except StorageError as error:
        return (), 0, describe(error, folder)
    # Prompts of one evaluation only, as when the held-out prompts were changed, have no pair.
    changes = {
        prompt_id: _mean_total(after[prompt_id]) - _mean_total(rows)
        for prompt_id, rows in before.items()
        if prompt_id in after
    }
    # A term may have refused all images of a prompt.
    changes = {name: change for name, change in changes.items() if not math.isnan(change)}
    cases = tuple(
        _case(folder, heading, (before[prompt_id], after[prompt_id]), readers)
        for heading, prompt_id in choose_cases(changes).items()
    )
    return cases, len(changes), None


def _rows_by_prompt(folder: RunFolder, step: int) -> dict[str, list[_Row]]:
    groups: dict[str, list[_Row]] = {}
    for row in read_evaluation(folder, step, _COLUMNS).to_pylist():
        groups.setdefault(row["prompt_id"], []).append(row)
    return groups


def _mean_total(rows: Sequence[_Row]) -> float:
    """Mean over the images that have a total; NaN if none has."""
    totals = [row["total"] for row in rows if not math.isnan(row["total"])]
    return fmean(totals) if totals else math.nan


def _case(
    folder: RunFolder,
    heading: str,
    ends: tuple[Sequence[_Row], Sequence[_Row]],
    readers: Mapping[str, bool],
) -> Case:
    before, after = ends
    first = before[0]
    given = [
        _tile(folder, name, after[0], "Source", first=f"source-{index}" if index > 1 else "source")
        for index, name in enumerate(first.get(SOURCES, ()), start=1)
    ]
    if first["target"] is not None:
        given.append(_tile(folder, first["target"], after[0], "Target", first="target"))
    samples = [
        _sample(folder, row, f"{when}, sample {index + 1}", index, readers)
        for when, rows in (("Before", before), ("After", after))
        for index, row in enumerate(rows)
    ]
    return Case(
        heading=heading,
        change=_mean_total(after) - _mean_total(before),
        decode_seed=first["decode_seed"],
        tiles=PromptTiles(first["prompt"], (*given, *samples), tuple(first["texts"])),
    )


def _sample(
    folder: RunFolder, row: _Row, label: str, index: int, readers: Mapping[str, bool]
) -> Tile:
    terms = {name.removeprefix(RAW): row[name] for name in row if name.startswith(RAW)}
    scores = {"total": row["total"], **terms}
    notes = {name: row.get(NOTE + name) for name in readers}
    readings = {
        name: read_letters(plain_form(note), row["texts"], is_case_sensitive=readers[name]).marks
        for name, note in notes.items()
        if note is not None
    }
    asked = read_asked(row.get(METADATA))
    found = {
        name.removeprefix(OBJECTS): mark_objects(
            row[name], asked, row.get(NOTE + name.removeprefix(OBJECTS))
        )
        for name in row
        if name.startswith(OBJECTS) and row[name] is not None
    }
    return replace(
        _tile(folder, row["image"], row, label, sample=index),
        scores=tuple((name, show_score(score)) for name, score in scores.items()),
        texts=tuple(row["texts"]),
        readings=readings,
        asked=asked,
        found=found,
    )


def _tile(
    folder: RunFolder,
    stored: str,
    row: _Row,
    label: str,
    *,
    sample: int = 0,
    first: str | None = None,
) -> Tile:
    """An image of a row's prompt; `first` names a target or source for the large view."""
    thumbnail = PurePosixPath("thumbs", image_name(stored)).with_suffix(".webp")
    # One that was made before outlives its image.
    shown = (folder.image_path(stored), folder.path / f"gallery/{thumbnail}")
    if not any(map(os.path.isfile, shown)):
        return Tile(label, None)
    place = {"prompt": row["prompt_id"], "step": row["step"], "sample": sample, "large": 1}
    query = urlencode(place | ({} if first is None else {"first": first}), errors="replace")
    return Tile(label, quote(str(thumbnail)), f"index.html#progress?{query}")


@dataclass(frozen=True)
class _Settings:
    """The config as text and as values, and what hinders reading it."""

    text: str | None
    config: Config | None
    problem: str | None


def write_before_after(folder: RunFolder, summary: Sequence[SummaryRow]) -> Path:
    """Write `gallery/report.html` of a run, whole or not at all.

    The page needs no network, no server and no script. It shows the thumbnails of the gallery and
    leads to the run's images by relative paths. A config or a table that cannot be read, and a
    run with fewer than two evaluations, are said in place.

    Args:
        summary: Before and after, one row a term and one for the total; may be empty.

    Returns:
        The path of the page.
    """
    steps = evaluation_steps(folder)
    settings = _read_settings(folder)
    config = settings.config
    cases, prompts, problem = read_cases(
        folder, steps, {} if config is None else list_readers(config)
    )
    report = None
    # Like the summary, not after every evaluation: bootstraps take seconds.
    if config is not None and summary:
        # Damage is the problem of `read_cases`.
        with suppress(StorageError):
            report = report_held_out(folder, config)
    page = render_page(
        "before_after.html.j2",
        run=" / ".join(folder.path.absolute().parts[-2:]),
        steps=steps,
        settings=settings,
        config=config,
        without_folders=without_folders,
        reward=None if config is None else _describe_reward(config),
        terms=None if config is None else _terms_table(config),
        scores=score_tables(report) if report and report.grouped.is_telling else [],
        conditions=conditions_table(report) if report else None,
        is_miniature=config is not None and config.model.path in EMBEDDED_MODELS,
        changes=_changes_table(summary, steps, config) if summary else None,
        interval=interval,
        show_change=show_change,
        total=next((row for row in summary if row.name == "total"), None),
        cases=cases,
        prompts=prompts,
        problem=problem,
        is_small=config is not None and config.rollout.width < SMALL_WIDTH,
    )
    return _write_page(folder, page)


def write_report_of_base(folder: RunFolder) -> Path:
    """Write `gallery/report.html` of an evaluation of the base model; returns its path."""
    config = read_config(folder)
    report = None
    # The gallery names the damage.
    with suppress(StorageError):
        report = report_held_out(folder, config)
    tables = [] if report is None else [*score_tables(report), conditions_table(report)]
    name = " / ".join(folder.path.absolute().parts[-2:])
    page = Report(f"Base model: {name}", [*tables, _terms_table(config)])
    return _write_page(folder, render_page("report.html.j2", report=page))


def _write_page(folder: RunFolder, page: bytes) -> Path:
    path = folder.path / "gallery/report.html"
    write_atomically(path, page)
    return path


def _read_settings(folder: RunFolder) -> _Settings:
    text = None
    try:
        text = read_config_text(folder)
        return _Settings(text, read_config(folder), None)
    except (CheckpointError, ConfigError, StorageError) as error:
        return _Settings(text, None, describe(error, folder))


def _describe_reward(config: Config) -> str:
    """The formula, such as `0.4 lpips + 0.3 ocr`; terms of no weight are left out."""
    weights = config.reward.weights()
    parts = [f"{weight:+g} {name}" for name, weight in weights.items() if weight != 0]
    return " ".join(f"{part[0]} {part[1:]}" for part in parts).removeprefix("+ ")


def _terms_table(config: Config) -> Table:
    """What each term measures: the first line of its documentation."""
    rows = tuple(
        (name, f"{term.weight:g}", f"{describe_term(term)} {caution_of(term)}".strip())
        for name, term in config.reward.terms.items()
    )
    return Table("terms of the reward", ("Term", "Weight", "What it measures"), rows, is_text=True)


def _changes_table(
    summary: Sequence[SummaryRow], steps: Sequence[int], config: Config | None
) -> Table:
    return Table(
        "scores before and after",
        (
            *("Score", f"Before, step {steps[0]}", f"After, step {steps[-1]}"),
            *("Change", "95 % interval", "Reading"),
        ),
        tuple((*change_row(row), _verdict(row, config)) for row in summary),
        interval_note(row.low for row in summary),
    )


def caution_of(term: TermConfig) -> str:
    """What a term's score does not say; empty for terms that need no such word."""
    if isinstance(term, LpipsConfig) and not term.pretrained:
        return (
            "The features are untrained: these distances compare structure but do not measure "
            "human perception."
        )
    if isinstance(term, AestheticConfig) and term.head.startswith(_EMBEDDED_WEIGHTS):
        return "Measured here with the small demonstration CLIP that comes with glm-grpo."
    return ""


def _verdict(row: SummaryRow, config: Config | None) -> Cell:
    """Better or worse by the sign of the term's weight, unless the interval includes 0."""
    if math.isnan(row.low):
        return Cell(NO_VALUE)
    if row.low <= 0 <= row.high:
        return Cell("no clear change")
    weights = {} if config is None else config.reward.weights()
    # The total should rise, and so should counts such as `ocr_exact`.
    weight = 0.0 if config is None else weights.get(row.name, 1.0)
    if weight == 0:
        return Cell("rose" if row.low > 0 else "fell")
    tone: Tone = "better" if (row.low > 0) == (weight > 0) else "worse"
    return Cell(tone, tone)


def describe_term(term: TermConfig) -> str:
    """The first line of a kind's documentation, with the image that the term compares with."""
    line = (type(term).__doc__ or "").split("\n")[0]
    if isinstance(term, ComparingConfig):
        return line.replace("target image", f"{term.against} image")
    return line
