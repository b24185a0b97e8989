"""Prompts: checked once, then dealt into batches as a pure function of (seed, step)."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from glm_grpo.config.sections import RolloutSection
from glm_grpo.data.entries import (
    PromptEntry,
    load_image,
    make_entry,
    refuse_long_source,
    refuse_reserved,
    verify_image,
)
from glm_grpo.data.files import (
    ASKING_FIELDS,
    JSON_FIELDS,
    READ_FIELDS,
    SOURCE_FIELDS,
    TARGET_FIELDS,
    Row,
    read_rows,
    shorten,
)
from glm_grpo.digests import digest
from glm_grpo.errors import DataError, Errors
from glm_grpo.models.base import ReservedTokens
from glm_grpo.seeds import derive_seed
from glm_grpo.types import PromptBatch
from rewards.images import ImageSource, describe_misfit
from rewards.types import Prompt

logger = logging.getLogger(__name__)

_WRITTEN_BY_HAND = (".jsonl", ".csv")
"""Formats whose fields users name themselves."""
_MOST_ERRORS = 10
"""Rows of a file that are refused before its reading ends."""
_MOST_NAMED = 3
"""Images or rows that a line names."""


@runtime_checkable
class PromptSource(Protocol):
    """Prompts in a fixed order, from a file or generated; the source of all batches."""

    @property
    def path(self) -> str:
        """The path or name that the user gave."""
        ...

    @property
    def height(self) -> int:
        """Height of the target images, pixels."""
        ...

    @property
    def width(self) -> int:
        """Width of the target images, pixels."""
        ...

    def ids(self) -> list[str]:
        """Ids of all prompts."""
        ...

    def origins(self) -> list[str]:
        """Where each prompt comes from, such as a file and a line, for errors."""
        ...

    def captions(self) -> list[str]:
        """Captions of all prompts, without loading an image."""
        ...

    def texts(self) -> list[tuple[str, ...]]:
        """Texts that each prompt asks for, without loading an image."""
        ...

    def metadata(self) -> list[Mapping[str, Any]]:
        """Further columns of each row, without loading an image."""
        ...

    def identities(self) -> list[Hashable]:
        """Keys that are equal for prompts that ask for the same, without loading an image."""
        ...

    def digests(self) -> dict[str, str]:
        """Digest of each prompt with its texts, images and metadata, by id, in order."""
        ...

    def has_targets(self) -> bool:
        """Whether any prompt has a target image."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


@dataclass(frozen=True)
class PromptSet:
    """Checked prompts in file order, see `PromptSource`.

    Images are loaded, and fitted to height and width, when an item is accessed.
    """

    path: str
    entries: tuple[PromptEntry, ...]
    height: int
    width: int

    def ids(self) -> list[str]:
        """Ids of all prompts."""
        return [entry.prompt_id for entry in self.entries]

    def origins(self) -> list[str]:
        """File and line of each prompt."""
        return [entry.origin for entry in self.entries]

    def captions(self) -> list[str]:
        """Captions of all prompts, without loading an image."""
        return [entry.prompt for entry in self.entries]

    def texts(self) -> list[tuple[str, ...]]:
        """Texts that each prompt asks for, without loading an image."""
        return [entry.texts for entry in self.entries]

    def metadata(self) -> list[Mapping[str, Any]]:
        """Further columns of each row, without loading an image."""
        return [entry.metadata for entry in self.entries]

    def identities(self) -> list[Hashable]:
        """Text and sources of each prompt; one source under two paths counts as two."""
        return [(entry.prompt, entry.sources) for entry in self.entries]

    def digests(self) -> dict[str, str]:
        """Digest of each prompt with its row and the files of its images, by id."""
        return {entry.prompt_id: _digest(entry) for entry in self.entries}

    def has_targets(self) -> bool:
        """Whether any prompt has a target image."""
        return any(entry.target is not None for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Prompt:
        entry = self.entries[index]

        def load(image: ImageSource) -> UInt8[Tensor, "3 H W"]:
            return load_image(image, entry.origin, height=self.height, width=self.width)

        return Prompt(
            entry.prompt_id,
            entry.prompt,
            texts=entry.texts,
            target=None if entry.target is None else load(entry.target),
            sources=tuple(map(load, entry.sources)),
            metadata=entry.metadata,
        )


def _digest(entry: PromptEntry) -> str:
    """Digest of a prompt with its texts and images, and after a hyphen, of its metadata."""
    images = [each for each in (entry.target, *entry.sources) if each is not None]
    contents = (each if isinstance(each, bytes) else each.read_bytes() for each in images)
    asked = digest(repr((entry.prompt, entry.texts)).encode(), *contents)
    return f"{asked}-{digest(json.dumps(entry.metadata, sort_keys=True).encode())}"


def load_prompts(
    path: str,
    *,
    height: int,
    width: int,
    reserved: ReservedTokens | None = None,
    sources: int = 0,
    check: Callable[[PromptSource], None] | None = None,
) -> PromptSet:
    """Read and check every prompt, and decode every image once.

    Fields of a row; others are metadata, see `rewards.Prompt`:

    - `prompt`: required, not blank, without tokens that the model reserves;
    - `target`, `target_image` or `file_name`: path of the image to match, relative to the folder
      of the file; in tables with embedded images also `image`;
    - `source` or `sources`: path of the image to edit, or a list of them, as for `target`;
    - `text`: the text the image should show, or a list of texts. If the field is missing or null,
      the quoted parts of the prompt (`find_quoted_texts`); blank means no text;
    - `id`: names the prompt in tables and files; by default the row's position, such as `00012`.

    Args:
        path: A file, a folder or a hub data set, as in `read_rows`.
        height: Height of the rollout's images, to which those of prompts are fitted, pixels.
        width: Width, pixels.
        reserved: Texts of special tokens, which no prompt may contain; None for a model without
            any.
        sources: Number of source images per prompt; 0 for text-to-image.
        check: Refuses what the rows ask for; its errors are raised together with those of rows.
    """
    entries: list[PromptEntry] = []
    checked = _CheckedRows(reserved or ReservedTokens(), sources, height=height, width=width)
    errors, unread, names = Errors(), set[str](), _FieldNames(has_sources=sources > 0)
    refused: dict[str, list[str]] = {}
    unreadable = Errors()
    with unreadable.collecting():
        for position, row in enumerate(read_rows(path)):
            if sum(map(len, refused.values())) == _MOST_ERRORS:
                refused["this row and those after it are not checked yet"] = [row.origin]
                break
            if sources == 0:
                unread |= {field for field in SOURCE_FIELDS if row.fields.get(field)}
            names.add(row)
            try:
                entries.append(checked.entry(row, position))
            except DataError as error:
                rule = str(error).removeprefix(f"{row.origin}: ")
                refused.setdefault(rule, []).append(row.origin)
    for rule, origins in refused.items():
        with errors.collecting():
            raise DataError(f"{_join_origins(origins)}: {rule}")
    with errors.collecting():
        unreadable.raise_all()
    for line in names.misspelt():
        # Columns of other formats often come from elsewhere, where they may mean something else.
        if Path(path).suffix.lower() not in _WRITTEN_BY_HAND:
            logger.warning("%s: %s", path, line)
            continue
        with errors.collecting():
            raise DataError(f"{path}: {line}")
    prompts = PromptSet(path=path, entries=tuple(entries), height=height, width=width)
    if check is not None:
        with errors.collecting():
            check(prompts)
    errors.raise_all()
    for field in unread:
        logger.warning(
            "%s: the field %s is ignored, because data.sources is 0; data.sources=1 trains on "
            "edits of the image that it names",
            path,
            field,
        )
    for kind, misfits in checked.misfits.items():
        logger.warning(
            "%s: %d of the %s images hardly fit rollout.width x rollout.height = %d x %d (less "
            "than half is left, or enlarged more than twice): %s; crop or replace them",
            path,
            len(misfits),
            kind,
            width,
            height,
            ", ".join([*misfits[:_MOST_NAMED], *(["..."] if len(misfits) > _MOST_NAMED else [])]),
        )
    return prompts


def _join_origins(origins: Sequence[str]) -> str:
    """Name rows of one file, such as `prompts.jsonl, line 2, line 3`."""
    return ", ".join([origins[0], *(origin.rpartition(", ")[2] for origin in origins[1:])])


class _FieldNames:
    """Finds fields that nearly have the name of one that is read: their rows would lose it.

    Not in a row that has the field, too, or if any other row has both: then it is another field.
    """

    def __init__(self, *, has_sources: bool) -> None:
        self._kinds = (
            *(("text",), ("id",), TARGET_FIELDS, *((SOURCE_FIELDS,) * has_sources)),
            *((name,) for name in ASKING_FIELDS),
        )
        self._meant: dict[str, dict[str, tuple[str, ...]]] = {}
        self._alone: dict[tuple[str, str], list[str]] = {}
        self._beside = set[tuple[str, str]]()

    def add(self, row: Row) -> None:
        """Remember the fields of a row."""
        for name in row.fields.keys() - READ_FIELDS:
            if name not in self._meant:
                self._meant[name] = {
                    meant: kind
                    for kind in self._kinds
                    for meant in difflib.get_close_matches(name.lower(), kind, n=1, cutoff=0.82)
                }
            for meant, kind in self._meant[name].items():
                # Many data sets have tags of their own.
                if meant == "tag" and row.fields.keys().isdisjoint(JSON_FIELDS):
                    continue
                if row.fields.keys().isdisjoint(kind):
                    self._alone.setdefault((name, meant), []).append(row.origin)
                else:
                    self._beside.add((name, meant))

    def misspelt(self) -> list[str]:
        """A line on each, with the field that is probably meant and the first rows."""
        return [
            f"the field {shorten(name)} is not read ({_name_rows(origins)}); rename it to "
            f"{meant!r}, or to something else if it has another meaning"
            for (name, meant), origins in sorted(self._alone.items())
            if (name, meant) not in self._beside
        ]


def _name_rows(origins: Sequence[str]) -> str:
    """The first rows, such as `line 1, line 2, ...`."""
    named = [origin.rpartition(", ")[2] for origin in origins[:_MOST_NAMED]]
    return ", ".join([*named, *(["..."] if len(origins) > _MOST_NAMED else [])])


class _CheckedRows:
    """Checks rows one by one; remembers their ids and the sizes of their images.

    Attributes:
        misfits: By kind of image, where and how images hardly fit the rollout's size.
    """

    def __init__(self, reserved: ReservedTokens, sources: int, *, height: int, width: int) -> None:
        self.misfits: dict[str, list[str]] = {}
        self._reserved = reserved
        self._sources = sources
        self._height, self._width = height, width
        self._origins: dict[str, str] = {}
        self._sizes: dict[ImageSource, tuple[int, int]] = {}

    def entry(self, row: Row, position: int) -> PromptEntry:
        entry = make_entry(row, position, sources=self._sources)
        refuse_reserved(entry, self._reserved)
        if entry.prompt_id in self._origins:
            raise DataError(
                f"{row.origin}: id {entry.prompt_id!r} is already used by "
                f"{self._origins[entry.prompt_id]}; ids must be unique, and rows without one are "
                "named by their position"
            )
        self._origins[entry.prompt_id] = row.origin
        if entry.target is not None:
            self._measure(entry.target, "target", row.origin)
        for source in entry.sources:
            refuse_long_source(source, self._measure(source, "source", row.origin), row.origin)
        return entry

    def _measure(self, image: ImageSource, kind: str, origin: str) -> tuple[int, int]:
        if image not in self._sizes:
            self._sizes[image] = verify_image(image, origin)
        size = self._sizes[image]
        if misfit := describe_misfit(size, height=self._height, width=self._width):
            place = origin.rpartition(", ")[2]
            self.misfits.setdefault(kind, []).append(f"{place} ({misfit})")
        return size


def shared_rows(held_out: PromptSource, training: PromptSource) -> list[int]:
    """Rows of held-out prompts that are also trained on."""
    trained = set(training.identities())
    return [row for row, each in enumerate(held_out.identities()) if each in trained]


def check_prompts_suffice(prompt_set: PromptSource, *, prompts_per_step: int) -> None:
    """Check that the set has enough prompts for a batch."""
    if prompts_per_step > len(prompt_set):
        raise DataError(
            f"rollout.prompts_per_step {prompts_per_step}: {prompt_set.path} contains only "
            f"{len(prompt_set)} prompt{'' if len(prompt_set) == 1 else 's'}, and those of a step "
            "must differ; lower it or add prompts"
        )


def batch_for_step(
    prompt_set: PromptSource, *, step: int, seed: int, prompts_per_step: int, group_size: int
) -> PromptBatch:
    """Deal the batch of a step, a pure function of the arguments: resuming needs no sampler state.

    Every epoch deals each prompt once, in its own order. If batches do not divide an epoch evenly,
    its last batch is completed from the next epoch with prompts that it does not contain yet, so
    all prompts within a batch differ.

    Args:
        prompt_set: Prompts to deal from, at least P.
        step: Training step, from 1.
    """
    check_prompts_suffice(prompt_set, prompts_per_step=prompts_per_step)
    rows = _rows_of_step(len(prompt_set), step=step, seed=seed, prompts_per_step=prompts_per_step)
    return _batch_of_rows(prompt_set, rows, step=step, seed=seed, group_size=group_size)


@dataclass(frozen=True)
class SparePrompts:
    """The prompts outside a step's batch, in an order determined by (seed, step).

    `rows` are indices into `prompt_set`; `step` counts from 1.
    """

    prompt_set: PromptSource
    rows: tuple[int, ...]
    step: int
    seed: int
    group_size: int

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, places: range) -> PromptBatch:
        """A batch of some of them, with the seeds that they have in this step."""
        return _batch_of_rows(
            self.prompt_set,
            self.rows[places.start : places.stop],
            step=self.step,
            seed=self.seed,
            group_size=self.group_size,
        )


def spares_for_step(
    prompt_set: PromptSource, *, step: int, seed: int, prompts_per_step: int, group_size: int
) -> SparePrompts:
    """Prompts that can replace those of a step; arguments as for `batch_for_step`."""
    count = len(prompt_set)
    held = {*_rows_of_step(count, step=step, seed=seed, prompts_per_step=prompts_per_step)}
    generator = torch.Generator().manual_seed(derive_seed(seed, "spare prompts", step - 1))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    rows = tuple(row for row in order if row not in held)
    return SparePrompts(prompt_set, rows, step=step, seed=seed, group_size=group_size)


def _rows_of_step(count: int, *, step: int, seed: int, prompts_per_step: int) -> list[int]:
    start = (step - 1) * prompts_per_step
    last = start + prompts_per_step - 1
    orders = {
        epoch: _epoch_order(count, epoch=epoch, seed=seed, prompts_per_step=prompts_per_step)
        for epoch in {start // count, last // count}
    }
    return [orders[place // count][place % count] for place in range(start, last + 1)]


def _batch_of_rows(
    prompt_set: PromptSource, rows: Sequence[int], *, step: int, seed: int, group_size: int
) -> PromptBatch:
    sampling_seed = derive_seed(seed, "sampling", step - 1)
    decode_seed = partial(derive_seed, seed, "decoding", step - 1)
    return _make_batch(prompt_set, rows, group_size, sampling_seed, decode_seed)


def _make_batch(
    prompt_set: PromptSource,
    rows: Sequence[int],
    group_size: int,
    seed: int,
    decode_seed: Callable[[str], int],
) -> PromptBatch:
    prompts = tuple(prompt_set[row] for row in rows)
    return PromptBatch(
        prompts=prompts,
        group_size=group_size,
        height=prompt_set.height,
        width=prompt_set.width,
        seed=seed,
        decode_seeds=tuple(decode_seed(prompt.prompt_id) for prompt in prompts),
    )


def part_of_batch(batch: PromptBatch, rows: range) -> PromptBatch:
    """Some prompts of a batch, with the same samples and noise as in the whole batch."""
    return prompts_at(batch, torch.arange(rows.start, rows.stop))


def prompts_at(batch: PromptBatch, rows: Int64[Tensor, " K"]) -> PromptBatch:
    """Like `part_of_batch`, for rows in any order."""
    ids, places = batch.source_token_ids, rows.tolist()
    return replace(
        batch,
        prompts=tuple(batch.prompts[row] for row in places),
        decode_seeds=tuple(batch.decode_seeds[row] for row in places),
        source_token_ids=None if ids is None else ids[rows],
    )


def evaluated_at_once(rollout: RolloutSection, samples_per_prompt: int, processes: int) -> int:
    """Prompts per evaluation batch: as many images as training samples at once, at least a prompt.

    Args:
        processes: Number of processes that share a training step.
    """
    images = rollout.prompts_per_step * rollout.group_size // processes
    return max(1, min(images, rollout.batch_size or images) // samples_per_prompt)


def evaluation_batches(
    prompt_set: PromptSource,
    rows: range,
    *,
    prompts_per_batch: int,
    samples_per_prompt: int,
    seed: int,
) -> list[PromptBatch]:
    """Batches of held-out prompts in order, with the same seeds at every evaluation of a run.

    Seeds depend only on `seed` and the prompt. Evaluations therefore differ only by the policy,
    however the prompts are batched.

    Args:
        rows: Indices of the prompts to evaluate.
        prompts_per_batch: P of all batches but the last, which may be smaller.
        samples_per_prompt: G.
    """
    sampling_seed = derive_seed(seed, "evaluation sampling")
    decode_seed = partial(derive_seed, seed, "evaluation decoding")
    return [
        _make_batch(
            prompt_set,
            rows[start : start + prompts_per_batch],
            samples_per_prompt,
            sampling_seed,
            decode_seed,
        )
        for start in range(0, len(rows), prompts_per_batch)
    ]


def _epoch_order(count: int, *, epoch: int, seed: int, prompts_per_step: int) -> list[int]:
    """Order of an epoch whose first prompts do not repeat those of an unfinished batch.

    The unfinished batch depends on the epoch before, back to the last epoch that began with a new
    batch: at most `prompts_per_step` epochs.
    """
    first = epoch
    while first * count % prompts_per_step:
        first -= 1
    order: list[int] = []
    for current in range(first, epoch + 1):
        generator = torch.Generator().manual_seed(derive_seed(seed, "order", current))
        drawn = torch.randperm(count, generator=generator).tolist()
        is_taken = set(order[count - current * count % prompts_per_step :])
        head_size = -current * count % prompts_per_step
        head = [row for row in drawn if row not in is_taken][:head_size]
        is_head = set(head)
        order = head + [row for row in drawn if row not in is_head]
    return order
