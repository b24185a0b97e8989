"""One picture of a run: target, before and after, side by side, for a README or a message."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder, read_picture, write_atomically
from glm_grpo.run.tables import evaluation_steps, read_evaluation

_GAP = 4
"""White pixels between pictures."""


def write_contact_sheet(folder: RunFolder, path: Path, *, columns: int) -> None:
    """Writes a PNG: a column for each of the first held-out prompts, in their order.

    Rows are the target (where the prompts have one), the first sample of the first evaluation and
    the first sample of the last, drawn with the same seeds.

    Args:
        folder: A run with at least one evaluation.
        path: Of the PNG.
        columns: Prompts shown at the most.

    Raises:
        StorageError: There is no evaluation, a picture is missing, or the file cannot be written.
    """
    steps = evaluation_steps(folder)
    if not steps:
        raise StorageError(f"{folder.path} holds no evaluation yet; let the run reach its first")
    rows: list[list[str]] = []
    for index, step in enumerate((steps[0], steps[-1])):
        table = read_evaluation(folder, step, ("step", "sample", "target", "image")).to_pandas()
        first = table[table["sample"] == 0].head(columns)
        if index == 0 and first["target"].notna().all():
            rows.append(list(first["target"]))
        rows.append(list(first["image"]))
        if not rows[-1] or len(rows[-1]) != len(rows[0]):
            raise StorageError(
                f"{folder.evaluation_path(step)} has a first sample of {len(rows[-1])} prompts, "
                f"{folder.evaluation_path(steps[0])} of {len(rows[0])}: a sheet needs the same "
                "prompts, at least one; restore the run's own from a copy"
            )
    pictures = [[_load(folder.picture(name)) for name in row] for row in rows]
    sizes = {picture.shape for row in pictures for picture in row}
    if len(sizes) > 1:
        raise StorageError(
            f"{folder.images_dir} holds pictures of several sizes for one sheet; "
            "restore the run's own from a copy"
        )
    sheet = np.concatenate([np.concatenate(row, axis=1) for row in pictures])
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, format="PNG", optimize=True)
    write_atomically(path, buffer.getvalue())


def _load(path: Path) -> np.ndarray:
    pixels = np.asarray(read_picture(path))
    return np.pad(pixels, ((0, _GAP), (0, _GAP), (0, 0)), constant_values=255)
