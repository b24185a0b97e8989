"""Draw one sheet of a run: targets, and samples before and after training."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
from PIL import Image, ImageDraw, ImageFont

from glm_grpo.errors import StorageError
from glm_grpo.output import counted
from glm_grpo.run.folder import RunFolder, read_image, write_atomically
from glm_grpo.run.summaries import first_run
from glm_grpo.run.tables import SOURCES, evaluation_steps, read_evaluation

_GAP = 4
"""White pixels between images."""
_LETTERS = 16
"""Font size in pixels of the row labels."""


def write_contact_sheet(folder: RunFolder, path: Path, *, columns: int) -> None:
    """Write the PNG of `draw_contact_sheet` to a path."""
    write_atomically(path, draw_contact_sheet(folder, columns=columns))


def draw_contact_sheet(
    folder: RunFolder, *, columns: int, last_step: int | None = None, side: int | None = None
) -> bytes:
    """Draw a PNG with a column for each of the held-out prompts that changed most.

    The rows are sources and target (if the prompts have them), the first sample of the first
    evaluation and the first sample of the last, drawn with the same seeds. If the run began with
    the weights of another one, that one's first sample comes before them. Labels are at the left.

    Args:
        folder: Run folder with at least one evaluation.
        columns: Largest number of prompts to show.
        last_step: Leave out later evaluations; None shows all.
        side: Shrink images to at most this many pixels a side, and enlarge those of less than
            half of it; None keeps their size.
    """
    steps = [each for each in evaluation_steps(folder) if last_step is None or each <= last_step]
    if not steps:
        raise StorageError(f"{folder.path} has no evaluation yet; wait for its first one")
    names: list[str] = []
    rows: list[list[Path]] = []
    drawn = [(folder, step, f"step {step}") for step in (steps[0], steps[-1])]
    base = first_run(folder)
    if base is not None:
        drawn.insert(0, (base, 0, "base"))
    ordered = _order_by_change(folder, steps)["prompt_id"]
    for index, (run, step, name) in enumerate(drawn):
        first = _first_samples(run, step)
        first = first.loc[[each for each in ordered if each in first.index]].head(columns)
        if index == 0 and SOURCES in first:
            rows += [[*map(run.image_path, each)] for each in zip(*first[SOURCES], strict=True)]
            names += ["source"] * len(rows)
        if index == 0 and first["target"].notna().all():
            rows.append([*map(run.image_path, first["target"])])
            names.append("target")
        rows.append([*map(run.image_path, first["image"])])
        names.append(name)
        if not rows[-1] or len(rows[-1]) != len(rows[0]):
            raise StorageError(
                f"{run.evaluation_path(step)} has first samples of "
                f"{counted(len(rows[-1]), 'prompt')}, {folder.evaluation_path(steps[0])} of "
                f"{len(rows[0])}: a sheet needs the same prompts, at least one; restore "
                "the originals from a copy"
            )
    images = [[_load(path, side) for path in row] for row in rows]
    sizes = {image.shape for row in images for image in row}
    if len(sizes) > 1:
        raise StorageError(
            f"{folder.images_dir} contains images of different sizes for one sheet; restore the "
            "originals from a copy"
        )
    labels = _draw_labels(names, height=images[0][0].shape[0])
    sheet = np.concatenate([labels, *map(np.concatenate, zip(*images, strict=True))], axis=1)
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def prompts_by_change(folder: RunFolder, *, last_step: int) -> list[str]:
    """Held-out prompts from the largest change of the first sample's total to the smallest.

    Empty if there are fewer than two evaluations until `last_step`.
    """
    steps = [each for each in evaluation_steps(folder) if each <= last_step]
    if len(steps) < 2:
        return []
    prompts: list[str] = _order_by_change(folder, steps)["prompt"].tolist()
    return prompts


def _order_by_change(folder: RunFolder, steps: Sequence[int]) -> pandas.DataFrame:
    """First samples of the first evaluation, in the order of `prompts_by_change`."""
    before = _first_samples(folder, steps[0])
    after = _first_samples(folder, steps[-1])
    changes = (after["total"] - before["total"]).abs().reindex(before.index)
    order = changes.sort_values(ascending=False, kind="stable").index
    return before.loc[order].reset_index()


def _first_samples(run: RunFolder, step: int) -> pandas.DataFrame:
    names = ("prompt_id", "prompt", "sample", "target", "image", "total", SOURCES)
    table = read_evaluation(run, step, names).to_pandas()
    return table[table["sample"] == 0].set_index("prompt_id")


def _load(path: Path, side: int | None) -> np.ndarray:
    image = read_image(path)
    if side is not None:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        # Images of miniatures are enlarged with sharp edges.
        factor = math.ceil(side / 2 / max(image.size))
        image = image.resize(
            (factor * image.width, factor * image.height), Image.Resampling.NEAREST
        )
    pixels = np.asarray(image)
    return np.pad(pixels, ((0, _GAP), (0, _GAP), (0, 0)), constant_values=255)


def _draw_labels(names: Sequence[str], *, height: int) -> np.ndarray:
    font = ImageFont.load_default(size=_LETTERS)
    width = _LETTERS + math.ceil(max(map(font.getlength, names)))
    drawn = Image.new("RGB", (width, height * len(names)), "white")
    for row, name in enumerate(names):
        middle = (_LETTERS // 2, height * row + height // 2)
        ImageDraw.Draw(drawn).text(middle, name, fill="black", font=font, anchor="lm")
    return np.asarray(drawn)
