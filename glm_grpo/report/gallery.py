"""The gallery: held-out prompts before and after training, with the scores beside the pictures.

It is made from stored tables alone, so it also works for a run that crashed or still goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from glm_grpo.report.curves import CURVE_HEIGHT, CURVE_WIDTH, draw_curves
from glm_grpo.report.summary import SummaryRow
from glm_grpo.storage import RunFolder, storage_errors, write_atomically
from glm_grpo.tables import evaluation_steps, read_evaluation, read_metrics

_RAW = "raw/"
_NOTE = "note/"
_SMALL_WIDTH = 256
"""Pictures narrower than this (pixels) are enlarged on the page, with their pixels kept sharp."""


@dataclass(frozen=True)
class Sample:
    """One picture with its scores.

    Attributes:
        image: Path relative to the page; None when the file is gone.
        total: The weighed reward.
        scores: By term; None where a term does not apply.
        notes: What terms found in it, by their name.
    """

    image: str | None
    total: float
    scores: Mapping[str, float | None]
    notes: Mapping[str, str]


@dataclass(frozen=True)
class PromptEntry:
    """One held-out prompt.

    Attributes:
        prompt_id: As in the tables.
        prompt: The caption.
        texts: The texts that should appear.
        target: Path of the target picture relative to the page, or None.
        groups: Heading -> samples: the first evaluation, then the last.
        change: Mean total of the last group less that of the first; None with one evaluation.
    """

    prompt_id: str
    prompt: str
    texts: tuple[str, ...]
    target: str | None
    groups: Mapping[str, tuple[Sample, ...]]
    change: float | None


def write_gallery(folder: RunFolder, summary: Sequence[SummaryRow]) -> Path:
    """Write `gallery/index.html` of a run, whole or not at all.

    The page needs no network and no server; it refers to the run's pictures by relative paths.

    Args:
        folder: The run. Without evaluations or metrics the page says so.
        summary: Before and after, one row a term and one for the total; may be empty.

    Returns:
        The path of the page.

    Raises:
        StorageError: A table is damaged, or the page cannot be written.
    """
    steps = evaluation_steps(folder)
    entries = _prompt_entries(folder, steps)
    environment = Environment(
        loader=PackageLoader("glm_grpo.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("gallery.html.j2").render(
        run=" / ".join(folder.path.absolute().parts[-2:]),
        evaluation_steps=steps,
        settings=_settings(folder),
        summary=summary,
        curves=draw_curves(read_metrics(folder)),
        curve_size=(CURVE_WIDTH, CURVE_HEIGHT),
        entries=entries,
        is_small=_is_small(folder, entries),
    )
    # A lone surrogate in a setting has no UTF-8 form.
    write_atomically(folder.gallery_path, page.encode("utf-8", "replace"))
    return folder.gallery_path


def _settings(folder: RunFolder) -> str | None:
    if not folder.config_path.exists():
        return None
    with storage_errors("read", folder.config_path):
        return folder.config_path.read_text(encoding="utf-8", errors="replace")


def _prompt_entries(folder: RunFolder, steps: Sequence[int]) -> tuple[PromptEntry, ...]:
    if not steps:
        return ()
    shown = dict.fromkeys((steps[0], steps[-1]))
    groups = {step: _rows_by_prompt(folder, step) for step in shown}
    # The prompts of the first evaluation; the others have the same unless the data was changed.
    return tuple(
        _prompt_entry(
            folder, {step: groups[step].get(prompt_id, []) for step in shown}, rows[0], steps
        )
        for prompt_id, rows in groups[steps[0]].items()
    )


def _rows_by_prompt(folder: RunFolder, step: int) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in read_evaluation(folder, step).to_pylist():
        groups.setdefault(row["prompt_id"], []).append(row)
    return groups


def _prompt_entry(
    folder: RunFolder,
    rows_by_step: Mapping[int, Sequence[dict[str, Any]]],
    prompt: Mapping[str, Any],
    steps: Sequence[int],
) -> PromptEntry:
    groups = {
        _heading(step, steps): tuple(_sample(folder, row) for row in rows)
        for step, rows in rows_by_step.items()
    }
    totals = [[row["total"] for row in rows] for rows in rows_by_step.values()]
    is_comparable = len(totals) == 2 and all(totals)
    return PromptEntry(
        prompt_id=prompt["prompt_id"],
        prompt=prompt["prompt"],
        texts=tuple(prompt["texts"]),
        target=_link(folder, prompt["target"]),
        groups=groups,
        change=fmean(totals[1]) - fmean(totals[0]) if is_comparable else None,
    )


def _heading(step: int, steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"Samples, step {step}"
    return f"Before, step {step}" if step == steps[0] else f"After, step {step}"


def _sample(folder: RunFolder, row: Mapping[str, Any]) -> Sample:
    scores = {
        name.removeprefix(_RAW): value for name, value in row.items() if name.startswith(_RAW)
    }
    return Sample(
        image=_link(folder, row["image"]),
        total=row["total"],
        scores=scores,
        notes={
            name.removeprefix(_NOTE): value
            for name, value in row.items()
            if name.startswith(_NOTE) and value is not None
        },
    )


def _link(folder: RunFolder, stored: str | None) -> str | None:
    """A path relative to the run folder as one relative to the page; safe names need no quoting."""
    if stored is None or not (folder.path / stored).is_file():
        return None
    return f"../{stored}"


def _is_small(folder: RunFolder, entries: Sequence[PromptEntry]) -> bool:
    links = (
        sample.image for entry in entries for group in entry.groups.values() for sample in group
    )
    first = next((link for link in links if link is not None), None)
    if first is None:
        return False
    with Image.open(folder.path / first.removeprefix("../")) as image:
        return image.width < _SMALL_WIDTH
