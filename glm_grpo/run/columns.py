"""Turn a rollout or an evaluation into the columns of its table, one row per image.

docs/reference/run_folder.md explains the columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow
import torch
from torch import Tensor

from glm_grpo.run.tables import CREDIT, METADATA, NOTE, OBJECTS, PIECES, RAW, SOURCES
from glm_grpo.types import Evaluation, Experience
from rewards.types import Prompt, RewardTable

Columns = dict[str, pyarrow.Array]

_LARGEST_HALF = torch.finfo(torch.float16).max
_STRINGS = pyarrow.list_(pyarrow.string())
_PIECE = pyarrow.struct(
    [(name, pyarrow.string()) for name in ("text", "kind")]
    + [(name, pyarrow.float32()) for name in ("value", "left", "top", "right", "bottom")]
)
"""Type of a `rewards.score_map.ScoreBox`; edges in pixels."""


@dataclass(frozen=True)
class ImagePaths:
    """Where the images of a table are, relative to the run folder.

    Attributes:
        images: One path per image, prompt by prompt.
        targets: One per prompt; None without a target.
        sources: One list per prompt, empty without sources.
    """

    images: Sequence[str]
    targets: Sequence[str | None]
    sources: Sequence[Sequence[str]]


def rollout_columns(experience: Experience, paths: ImagePaths, step: int) -> Columns:
    """Columns of what was sampled, scored and trained on in `step`; pixels are not read."""
    prompts, rollout = experience.prompts.prompts, experience.rollout
    size = experience.prompts.group_size
    columns = _prompt_columns(prompts, experience.images.decode_seeds, paths, step, size)
    source_ids = experience.prompts.source_token_ids
    if source_ids is not None:
        rows = _repeat(source_ids.flatten(1).tolist(), size)
        columns["source_token_ids"] = pyarrow.array(rows, pyarrow.list_(pyarrow.int32()))
    columns["token_ids"] = _list_column(rollout.token_ids, pyarrow.int32())
    columns["log_probs"] = _list_column(rollout.log_probs, pyarrow.float32())
    columns |= _score_columns(experience.scores)
    columns |= _place_columns(experience)
    columns["total"] = _float_column(experience.totals)
    columns["penalty"] = _float_column(experience.penalties)
    columns["advantage"] = _float_column(experience.advantages)
    is_zero_std = experience.is_zero_std().tolist()
    columns["is_flat"] = pyarrow.array(_repeat(is_zero_std, size), pyarrow.bool_())
    if experience.trained is not None:
        discarded = experience.is_discarded().tolist()
        columns["is_discarded"] = pyarrow.array(_repeat(discarded, size), pyarrow.bool_())
    columns["image"] = pyarrow.array(paths.images, pyarrow.string())
    return columns


def evaluation_columns(evaluation: Evaluation, paths: ImagePaths) -> Columns:
    """Columns of an evaluation; pixels are not read."""
    seeds, size = evaluation.images.decode_seeds, evaluation.totals.shape[1]
    columns = _prompt_columns(evaluation.prompts, seeds, paths, evaluation.step, size)
    columns |= _score_columns(evaluation.scores)
    columns["total"] = _float_column(evaluation.totals)
    columns["image"] = pyarrow.array(paths.images, pyarrow.string())
    return columns


def _prompt_columns(
    prompts: Sequence[Prompt],
    decode_seeds: Sequence[int],
    paths: ImagePaths,
    step: int,
    size: int,
) -> Columns:
    """What identifies each image, and what its prompt came with; sources only if there are any."""
    count = len(prompts) * size
    texts = _repeat([list(prompt.texts) for prompt in prompts], size)
    columns = {
        "step": pyarrow.array([step] * count, pyarrow.int32()),
        "prompt_id": _string_column([prompt.prompt_id for prompt in prompts], size),
        "prompt": _string_column([prompt.prompt for prompt in prompts], size),
        "texts": pyarrow.array(texts, _STRINGS),
        "sample": pyarrow.array(list(range(size)) * len(prompts), pyarrow.int32()),
        "decode_seed": pyarrow.array(_repeat(decode_seeds, size), pyarrow.int64()),
        "target": _string_column(paths.targets, size),
    }
    if any(prompt.metadata for prompt in prompts):
        rows = [json.dumps(prompt.metadata, ensure_ascii=False) for prompt in prompts]
        columns[METADATA] = _string_column(rows, size)
    if paths.sources[0]:
        columns[SOURCES] = pyarrow.array(_repeat(paths.sources, size), _STRINGS)
    return columns


def _score_columns(table: RewardTable) -> Columns:
    """One column per term, one for its notes and one for objects; null if it does not apply.

    A score is NaN if the term applies, but refused the image.
    """
    columns = {}
    for index, name in enumerate(table.names):
        scores = table.raw[:, :, index].tolist()
        applies = table.is_applicable[:, index].tolist()
        values = [
            score if is_applicable else None
            for group, is_applicable in zip(scores, applies, strict=True)
            for score in group
        ]
        columns[f"{RAW}{name}"] = pyarrow.array(values, pyarrow.float32())
    size = table.raw.shape[1]
    for name, groups in table.notes.items():
        notes = [note for group in groups for note in group or (None,) * size]
        columns[f"{NOTE}{name}"] = pyarrow.array(notes, pyarrow.string())
    for name, found in table.objects.items():
        objects = [of_image for group in found for of_image in group or (None,) * size]
        columns[f"{OBJECTS}{name}"] = pyarrow.array(objects, _STRINGS)
    return columns


def _place_columns(experience: Experience) -> Columns:
    """What places and letters earned; nothing with credit by image."""
    columns = {}
    places = experience.place_credit
    if places is not None:
        # Infinity would be no credit.
        halves = places.flatten(0, 1).clamp(-_LARGEST_HALF, _LARGEST_HALF).half().numpy()
        rows = [[list(row) for row in image] for image in halves]
        columns[CREDIT] = pyarrow.array(rows, pyarrow.list_(pyarrow.list_(pyarrow.float16())))
    size = experience.scores.raw.shape[1]
    for name, groups in experience.scores.score_boxes.items():
        found = [
            None if pieces is None else [vars(piece) for piece in pieces]
            for group in groups
            for pieces in group or (None,) * size
        ]
        columns[f"{PIECES}{name}"] = pyarrow.array(found, pyarrow.list_(_PIECE))
    return columns


def _repeat(values: Iterable[Any], size: int) -> list[Any]:
    return [value for value in values for _ in range(size)]


def _string_column(values: Sequence[str | None], size: int) -> pyarrow.Array:
    return pyarrow.array(_repeat(values, size), pyarrow.string())


def _float_column(values: Tensor) -> pyarrow.Array:
    return pyarrow.array(values.flatten().tolist(), pyarrow.float32())


def _list_column(values: Tensor, kind: pyarrow.DataType) -> pyarrow.Array:
    """A list per image from a tensor [P, G, T]."""
    return pyarrow.array(list(values.flatten(0, 1).cpu().numpy()), pyarrow.list_(kind))
