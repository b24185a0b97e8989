"""Write metrics, tables and images into the run folder; every write is atomic.

`glm_grpo.training.records` decides what is written when; `glm_grpo.run.tables` reads it back.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pyarrow.parquet
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from glm_grpo.run.columns import Columns, ImagePaths, evaluation_columns, rollout_columns
from glm_grpo.run.folder import (
    RunFolder,
    append_line,
    atomic_directory,
    remove,
    remove_leftovers,
    safe_name,
    step_of,
    write_atomically,
)
from glm_grpo.run.tables import Weighing, read_metrics_lines, weighing_metadata
from glm_grpo.types import Evaluation, Experience, ImageBatch
from rewards.types import Prompt, RewardTable
from rewards.weighting import Mode

_PNG_COMPRESSION = 1
"""Fastest level; lossless like all levels."""
_ENCODERS = 8
"""Threads that encode images; each takes 0.1 s for 1024 x 1024 pixels."""


def append_metrics(folder: RunFolder, step: int, metrics: Mapping[str, float]) -> None:
    """Append metrics of a step, or of its evaluation, as one line to `metrics.jsonl`.

    Values that are not finite are stored as null, because JSON lacks them.
    """
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    append_line(folder.metrics_path, json.dumps({"step": step, **finite}))


def write_rollout(
    folder: RunFolder,
    experience: Experience,
    png_files: Sequence[bytes],
    step: int,
    *,
    combine: Mode,
) -> None:
    """Write the table and images of what was sampled, scored and trained on in `step`.

    Args:
        experience: With one advantage per image; its pixels are not read.
        png_files: Its images as PNG files, see `encode`.
        combine: How terms are combined into totals; stored with the weights, so that the totals can
            be recomputed.
    """
    prompts = experience.prompts.prompts
    paths = ImagePaths(
        _write_images(folder, folder.image_dir(step), prompts, png_files),
        _write_targets(folder, folder.train_targets_dir, prompts),
        _write_sources(folder, folder.train_sources_dir, prompts),
    )
    columns = rollout_columns(experience, paths, step)
    _write_table(folder.rollout_path(step), columns, experience.scores, combine)


def write_evaluation(folder: RunFolder, evaluation: Evaluation, *, combine: Mode) -> None:
    """Write the table and images of an evaluation; `combine` and errors as in `write_rollout`."""
    prompts, png_files = evaluation.prompts, encode(evaluation.images)
    paths = ImagePaths(
        _write_images(folder, folder.evaluation_image_dir(evaluation.step), prompts, png_files),
        _write_targets(folder, folder.targets_dir, prompts),
        _write_sources(folder, folder.sources_dir, prompts),
    )
    columns = evaluation_columns(evaluation, paths)
    _write_table(folder.evaluation_path(evaluation.step), columns, evaluation.scores, combine)


def truncate_after(folder: RunFolder, step: int) -> None:
    """Remove everything recorded after `step`, before a run resumes from there.

    A metrics line truncated by a kill is removed too, so that the resumed run ends with the same
    `metrics.jsonl` as an uninterrupted one. Checkpoints are not touched.
    """
    lines = [line for line in read_metrics_lines(folder) if int(line["step"] or 0) <= step]
    # Not in subfolders: some belong to trackers.
    remove_leftovers(folder.path)
    for parent in (folder.gallery_path.parent, folder.failures_dir):
        remove_leftovers(parent, below=True)
    for parent in (folder.rollouts_dir, folder.evaluations_dir, folder.images_dir):
        remove_leftovers(parent, below=True)
        for path in sorted(parent.glob("*")):
            recorded_at = step_of(path)
            if recorded_at is not None and recorded_at > step:
                remove(path)
    # Last, because tables without a metrics line look like a run that lost its metrics.
    if folder.metrics_path.exists():
        content = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(folder.metrics_path, content.encode())


def encode(images: ImageBatch) -> list[bytes]:
    """Encode the images as PNG files, prompt by prompt."""
    # Compression releases the interpreter lock.
    with ThreadPoolExecutor(_ENCODERS) as encoders:
        return list(encoders.map(_png, images.pixels.cpu().flatten(0, 1)))


def store_failure(folder: RunFolder, images: UInt8[Tensor, "G 3 H W"], step: int) -> Path:
    """Store images that could not be scored, and return their folder."""
    directory = folder.failure_dir(step)
    for sample, pixels in enumerate(images.cpu()):
        write_atomically(directory / f"{sample}.png", _png(pixels))
    return directory


def _write_images(
    folder: RunFolder, directory: Path, prompts: Sequence[Prompt], png_files: Sequence[bytes]
) -> list[str]:
    size = len(png_files) // len(prompts)
    names = [
        f"{safe_name(prompt.prompt_id)}-{sample}.png"
        for prompt in prompts
        for sample in range(size)
    ]
    with atomic_directory(directory) as temporary:
        for name, content in zip(names, png_files, strict=True):
            (temporary / name).write_bytes(content)
    return [_relative(folder, directory / name) for name in names]


def _write_targets(
    folder: RunFolder, directory: Path, prompts: Sequence[Prompt]
) -> list[str | None]:
    return [
        None
        if prompt.target is None
        else _write_once(folder, directory / f"{safe_name(prompt.prompt_id)}.png", prompt.target)
        for prompt in prompts
    ]


def _write_sources(
    folder: RunFolder, directory: Path, prompts: Sequence[Prompt]
) -> list[list[str]]:
    return [
        [
            _write_once(folder, directory / f"{safe_name(prompt.prompt_id)}-{number}.png", source)
            for number, source in enumerate(prompt.sources)
        ]
        for prompt in prompts
    ]


def _write_once(folder: RunFolder, path: Path, pixels: UInt8[Tensor, "3 H W"]) -> str:
    """Write an image that prompts came with if it is missing."""
    if not path.exists():
        write_atomically(path, _png(pixels))
    return _relative(folder, path)


def _relative(folder: RunFolder, path: Path) -> str:
    return path.relative_to(folder.path).as_posix()


def _write_table(path: Path, columns: Columns, scores: RewardTable, combine: Mode) -> None:
    weighing = Weighing(
        weights=dict(zip(scores.names, scores.weights.tolist(), strict=True)),
        std_floors=dict(zip(scores.names, scores.std_floors.tolist(), strict=True)),
        combine=combine,
    )
    table = pyarrow.table(columns).replace_schema_metadata(weighing_metadata(weighing))
    content = io.BytesIO()
    pyarrow.parquet.write_table(table, content)
    write_atomically(path, content.getvalue())


def _png(pixels: UInt8[Tensor, "3 H W"]) -> bytes:
    content = io.BytesIO()
    image = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
    image.save(content, format="PNG", compress_level=_PNG_COMPRESSION)
    return content.getvalue()
