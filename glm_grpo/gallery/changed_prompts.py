"""Held-out prompts before and after training, those that changed most and least among them.

They are read from stored tables alone, so it also works for a run that crashed or still goes on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from statistics import fmean
from typing import Any
from urllib.parse import quote

from glm_grpo.errors import StorageError
from glm_grpo.gallery.problems import describe
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import RAW, picture_name, read_evaluation

_COLUMNS = ("step", "prompt_id", "prompt", "texts", "decode_seed", "target", "total", "image", RAW)

_Row = dict[str, Any]


@dataclass(frozen=True)
class Picture:
    """One picture with its scores; a target has none.

    Attributes:
        thumbnail: Path relative to the page; None when neither it nor the picture is there.
        original: Path relative to the page; None when the picture is gone.
        scores: By term, the total first; None where a term does not apply.
    """

    thumbnail: str | None
    original: str | None
    scores: Mapping[str, float | None]


@dataclass(frozen=True)
class Case:
    """One held-out prompt, chosen by how much it changed.

    Attributes:
        heading: Which of the chosen ones.
        prompt: The caption.
        texts: The texts that should appear.
        change: Mean total of the last evaluation less that of the first.
        decode_seed: Of the noise from which the decoder began all pictures of the prompt.
        target: None for a prompt without one.
        before: One for each sample of the first evaluation.
        after: The same samples, in the last evaluation.
    """

    heading: str
    prompt: str
    texts: tuple[str, ...]
    change: float
    decode_seed: int
    target: Picture | None
    before: tuple[Picture, ...]
    after: tuple[Picture, ...]


def choose_cases(changes: Mapping[str, float]) -> dict[str, str]:
    """Which prompts are shown, by rule and not by hand.

    Prompts in order of their change, those that are equal in the order given: the first, the last,
    and the one in the middle; of an even number, the one of the two in the middle that changed
    for the worse. Two prompts have no one between them, and a single one is all there is.

    Args:
        changes: By prompt id.

    Returns:
        Heading -> prompt id.
    """
    ordered = sorted(changes, key=lambda prompt_id: changes[prompt_id], reverse=True)
    if not ordered:
        return {}
    if len(ordered) == 1:
        return {"The only prompt": ordered[0]}
    middle = {"Median change": ordered[len(ordered) // 2]} if len(ordered) > 2 else {}
    return {"Best change": ordered[0], **middle, "Worst change": ordered[-1]}


def read_cases(folder: RunFolder, steps: Sequence[int]) -> tuple[tuple[Case, ...], int, str | None]:
    """The chosen prompts, the number of those that both evaluations have, and a problem."""
    if len(steps) < 2:
        return (), 0, None
    try:
        before, after = (_rows_by_prompt(folder, step) for step in (steps[0], steps[-1]))
    except StorageError as error:
        return (), 0, describe(error, folder)
    # Others, where the held-out prompts were changed between the two, have no pair.
    changes = {
        prompt_id: _mean_total(after[prompt_id]) - _mean_total(rows)
        for prompt_id, rows in before.items()
        if prompt_id in after
    }
    cases = tuple(
        _case(folder, heading, before[prompt_id], after[prompt_id])
        for heading, prompt_id in choose_cases(changes).items()
    )
    return cases, len(changes), None


def _rows_by_prompt(folder: RunFolder, step: int) -> dict[str, list[_Row]]:
    groups: dict[str, list[_Row]] = {}
    for row in read_evaluation(folder, step, _COLUMNS).to_pylist():
        for picture in (row["image"], row["target"]):
            if picture is not None:
                folder.picture(picture)
        groups.setdefault(row["prompt_id"], []).append(row)
    return groups


def _mean_total(rows: Sequence[_Row]) -> float:
    return fmean(row["total"] for row in rows)


def _case(folder: RunFolder, heading: str, before: Sequence[_Row], after: Sequence[_Row]) -> Case:
    first = before[0]
    target = first["target"]
    return Case(
        heading=heading,
        prompt=first["prompt"],
        texts=tuple(first["texts"]),
        change=_mean_total(after) - _mean_total(before),
        decode_seed=first["decode_seed"],
        target=None if target is None else Picture(*_paths(folder, target), {}),
        before=tuple(_picture(folder, row) for row in before),
        after=tuple(_picture(folder, row) for row in after),
    )


def _picture(folder: RunFolder, row: _Row) -> Picture:
    terms = {name.removeprefix(RAW): row[name] for name in row if name.startswith(RAW)}
    scores = {"total": row["total"], **terms}
    return Picture(*_paths(folder, row["image"]), scores)


def _paths(folder: RunFolder, stored: str) -> tuple[str | None, str | None]:
    """Thumbnail and picture relative to the page, of a path relative to the run folder."""
    thumbnail = PurePosixPath("thumbs", picture_name(stored)).with_suffix(".webp")
    original = quote(f"../{stored}") if os.path.isfile(folder.picture(stored)) else None
    # One that was made before outlives its picture.
    if original is None and not os.path.isfile(folder.inside(f"gallery/{thumbnail}")):
        return None, None
    return quote(str(thumbnail)), original
