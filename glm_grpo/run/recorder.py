"""Write metrics, rollouts, evaluations and pictures into the run folder.

`glm_grpo.run.tables` reads them back; `glm_grpo.training.records` decides what is written when. One
process of a run records; every write is atomic.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from glm_grpo.config import RunSection
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
from glm_grpo.run.tables import (
    CREDIT,
    PIECES,
    Weighing,
    read_metrics_lines,
    weighing_metadata,
)
from glm_grpo.run.trackers import EMPTY_RUN_INFO, Trackers
from glm_grpo.types import Evaluation, Experience, ImageBatch
from rewards.reweigh import Mode
from rewards.types import Prompt, RewardTable

_PNG_COMPRESSION = 1
"""Fastest level; lossless like all levels."""
_ENCODERS = 8
"""Threads that encode pictures; each takes 0.1 s for 1024 x 1024 pixels."""
_LARGEST_HALF = torch.finfo(torch.float16).max
_PIECE = pyarrow.struct(
    [("text", pyarrow.string())]
    + [(name, pyarrow.float32()) for name in ("value", "left", "top", "right", "bottom")]
)
"""Type of a `rewards.parts.Piece`; edges in pixels."""


class Recorder:
    """Writes the run folder and forwards metrics to the trackers."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        trackers: tuple[str, ...],
        config: Mapping[str, Any],
        about: RunSection = EMPTY_RUN_INFO,
        combine: Mode,
    ) -> None:
        """Set up the recorder; nothing is written before the first record.

        Args:
            trackers: Names known to accelerate, for instance `tensorboard` or `wandb`.
            config: The resolved configuration, for the trackers.
            about: Name, notes and tags of the run, for the trackers.
            combine: How terms are combined into totals; stored in the tables with the weights, so
                that the totals can be recomputed.
        """
        self._folder = folder
        self._trackers = Trackers(trackers, folder, config, about)
        self._combine = combine

    def record_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append metrics of a step, or of its evaluation, as one line to `metrics.jsonl`.

        Values that are not finite are stored as null.

        Raises:
            StorageError: Writing failed; earlier lines stay.
        """
        append_line(self._folder.metrics_path, json.dumps({"step": step, **_finite(metrics)}))

    def track_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward metrics to the trackers, from the main thread, to which MLflow binds its run."""
        self._trackers.log(step, metrics)

    def track_groups(self, experience: Experience, pictures: Sequence[bytes], step: int) -> None:
        """Show groups of a step in the trackers; from the main thread, as `track_step`.

        Args:
            experience: Experience of the step; its pixels are not read.
            pictures: Its images as PNG files, see `encode`.
        """
        self._trackers.log_groups(experience, pictures, step)

    def record_rollout(self, experience: Experience, pictures: Sequence[bytes], step: int) -> None:
        """Store what was sampled, scored and trained on in `step`, one row per image.

        Target images are stored if they are missing.

        Args:
            experience: Experience to store; its pixels are not read.
            pictures: Its images as PNG files, see `encode`.
        """
        prompts = experience.prompts.prompts
        images = self._write_images(self._folder.image_dir(step), prompts, pictures)
        size = experience.prompts.group_size
        tokens = experience.rollout.token_ids.flatten(0, 1).cpu().numpy()
        log_probs = experience.rollout.log_probs.flatten(0, 1).cpu().numpy()
        columns = _identity_columns(step, prompts, experience.images.decode_seeds, size)
        folder = self._folder
        columns |= self._given_columns(
            folder.train_targets_dir, folder.train_sources_dir, prompts, size
        )
        ids = experience.prompts.source_token_ids
        if ids is not None:
            rows = _repeat(ids.flatten(1).tolist(), size)
            columns["source_token_ids"] = pyarrow.array(rows, pyarrow.list_(pyarrow.int32()))
        columns["token_ids"] = pyarrow.array(list(tokens), pyarrow.list_(pyarrow.int32()))
        columns["log_probs"] = pyarrow.array(list(log_probs), pyarrow.list_(pyarrow.float32()))
        columns |= _score_columns(experience.rewards)
        columns |= _place_columns(experience)
        columns["total"] = _float_column(experience.totals)
        columns["penalty"] = _float_column(experience.penalties)
        columns["advantage"] = _float_column(experience.advantages.values)
        is_flat = experience.advantages.is_flat.tolist()
        columns["is_flat"] = pyarrow.array(_repeat(is_flat, size), pyarrow.bool_())
        if experience.trained is not None:
            discarded = experience.is_discarded().tolist()
            columns["is_discarded"] = pyarrow.array(_repeat(discarded, size), pyarrow.bool_())
        columns["image"] = pyarrow.array(images, pyarrow.string())
        self._write_table(self._folder.rollout_path(step), columns, experience.rewards)

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Store an evaluation, one row per image, and missing target images."""
        prompts, size = evaluation.prompts, evaluation.totals.shape[1]
        image_dir = self._folder.evaluation_image_dir(evaluation.step)
        images = self._write_images(image_dir, prompts, encode(evaluation.images))
        columns = _identity_columns(evaluation.step, prompts, evaluation.images.decode_seeds, size)
        folder = self._folder
        columns |= self._given_columns(folder.targets_dir, folder.sources_dir, prompts, size)
        columns |= _score_columns(evaluation.rewards)
        columns["total"] = _float_column(evaluation.totals)
        columns["image"] = pyarrow.array(images, pyarrow.string())
        path = self._folder.evaluation_path(evaluation.step)
        self._write_table(path, columns, evaluation.rewards)
        self._trackers.log_evaluation(evaluation)

    def truncate_after(self, step: int) -> None:
        """Remove everything recorded after `step`, before a run resumes from there.

        A metrics line truncated by a kill is removed too, so that the resumed run ends with the
        same `metrics.jsonl` as an uninterrupted one. Checkpoints are not touched.
        """
        folder = self._folder
        lines = [line for line in read_metrics_lines(folder) if int(line["step"] or 0) <= step]
        self._trackers.go_on_after(step)
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

    def close(self) -> None:
        """Finish the trackers."""
        self._trackers.close()

    def _write_images(
        self, directory: Path, prompts: tuple[Prompt, ...], pictures: Sequence[bytes]
    ) -> list[str]:
        """Write a folder of pictures; returns their paths in the run folder, prompt by prompt."""
        size = len(pictures) // len(prompts)
        names = [
            f"{safe_name(prompt.prompt_id)}-{sample}.png"
            for prompt in prompts
            for sample in range(size)
        ]
        with atomic_directory(directory) as temporary:
            for name, content in zip(names, pictures, strict=True):
                (temporary / name).write_bytes(content)
        return [self._relative(directory / name) for name in names]

    def _write_once(self, path: Path, pixels: UInt8[Tensor, "3 H W"]) -> str:
        """Write a picture that prompts came with if it is missing; returns its path in the run."""
        if not path.exists():
            write_atomically(path, _png(pixels))
        return self._relative(path)

    def _given_columns(
        self, targets: Path, sources: Path, prompts: tuple[Prompt, ...], size: int
    ) -> dict[str, pyarrow.Array]:
        """Write missing targets and sources; returns columns of their paths, sources if any."""
        names = [safe_name(prompt.prompt_id) for prompt in prompts]
        paths = [
            None
            if prompt.target is None
            else self._write_once(targets / f"{name}.png", prompt.target)
            for name, prompt in zip(names, prompts, strict=True)
        ]
        columns = {"target": _string_column(paths, size)}
        if prompts[0].sources:
            rows = [
                [
                    self._write_once(sources / f"{name}-{number}.png", source)
                    for number, source in enumerate(prompt.sources)
                ]
                for name, prompt in zip(names, prompts, strict=True)
            ]
            kind = pyarrow.list_(pyarrow.string())
            columns["sources"] = pyarrow.array(_repeat(rows, size), kind)
        return columns

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._folder.path).as_posix()

    def _write_table(
        self, path: Path, columns: Mapping[str, pyarrow.Array], rewards: RewardTable
    ) -> None:
        weighing = Weighing(
            weights=dict(zip(rewards.names, rewards.weights.tolist(), strict=True)),
            std_floors=dict(zip(rewards.names, rewards.std_floors.tolist(), strict=True)),
            combine=self._combine,
        )
        table = pyarrow.table(dict(columns)).replace_schema_metadata(weighing_metadata(weighing))
        content = io.BytesIO()
        pyarrow.parquet.write_table(table, content)
        write_atomically(path, content.getvalue())


def encode(images: ImageBatch) -> list[bytes]:
    """Encode the pictures as PNG files, prompt by prompt."""
    # Compression releases the interpreter lock.
    with ThreadPoolExecutor(_ENCODERS) as encoders:
        return list(encoders.map(_png, images.pixels.cpu().flatten(0, 1)))


def store_failure(folder: RunFolder, pictures: UInt8[Tensor, "G 3 H W"], step: int) -> Path:
    """Store pictures that could not be scored, and return their folder."""
    directory = folder.failure_dir(step)
    for sample, pixels in enumerate(pictures.cpu()):
        write_atomically(directory / f"{sample}.png", _png(pixels))
    return directory


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _identity_columns(
    step: int, prompts: tuple[Prompt, ...], decode_seeds: tuple[int, ...], size: int
) -> dict[str, pyarrow.Array]:
    count = len(prompts) * size
    texts = _repeat([list(prompt.texts) for prompt in prompts], size)
    return {
        "step": pyarrow.array([step] * count, pyarrow.int32()),
        "prompt_id": _string_column([prompt.prompt_id for prompt in prompts], size),
        "prompt": _string_column([prompt.prompt for prompt in prompts], size),
        "texts": pyarrow.array(texts, pyarrow.list_(pyarrow.string())),
        "sample": pyarrow.array(list(range(size)) * len(prompts), pyarrow.int32()),
        "decode_seed": pyarrow.array(_repeat(decode_seeds, size), pyarrow.int64()),
    }


def _score_columns(rewards: RewardTable) -> dict[str, pyarrow.Array]:
    """One column per term, and one for its notes; null if the term does not apply.

    A score is NaN if the term applies, but refused the image.
    """
    columns = {}
    for index, name in enumerate(rewards.names):
        scores = rewards.raw[:, :, index].tolist()
        applies = rewards.is_applicable[:, index].tolist()
        values = [
            score if is_applicable else None
            for group, is_applicable in zip(scores, applies, strict=True)
            for score in group
        ]
        columns[f"raw/{name}"] = pyarrow.array(values, pyarrow.float32())
    size = rewards.raw.shape[1]
    for name, groups in rewards.notes.items():
        notes = [note for group in groups for note in group or (None,) * size]
        columns[f"note/{name}"] = pyarrow.array(notes, pyarrow.string())
    return columns


def _place_columns(experience: Experience) -> dict[str, pyarrow.Array]:
    """What places and letters earned; nothing with credit by image."""
    columns = {}
    places = experience.advantages.place_credit
    if places is not None:
        # Infinity would be no credit.
        halves = places.flatten(0, 1).clamp(-_LARGEST_HALF, _LARGEST_HALF).half().numpy()
        rows = [[list(row) for row in image] for image in halves]
        columns[CREDIT] = pyarrow.array(rows, pyarrow.list_(pyarrow.list_(pyarrow.float16())))
    size = experience.rewards.raw.shape[1]
    for name, groups in experience.rewards.pieces.items():
        found = [
            None if pieces is None else [vars(piece) for piece in pieces]
            for group in groups
            for pieces in group or (None,) * size
        ]
        columns[f"{PIECES}{name}"] = pyarrow.array(found, pyarrow.list_(_PIECE))
    return columns


def _repeat(values: Any, size: int) -> list[Any]:
    return [value for value in values for _ in range(size)]


def _string_column(values: Sequence[str | None], size: int) -> pyarrow.Array:
    return pyarrow.array(_repeat(values, size), pyarrow.string())


def _float_column(values: Tensor) -> pyarrow.Array:
    return pyarrow.array(values.flatten().tolist(), pyarrow.float32())


def _png(pixels: UInt8[Tensor, "3 H W"]) -> bytes:
    content = io.BytesIO()
    image = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
    image.save(content, format="PNG", compress_level=_PNG_COMPRESSION)
    return content.getvalue()
