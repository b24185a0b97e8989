"""Show other runs in a gallery: their curves, and held-out pictures of their newest evaluations.

The pictures are copied to `gallery/beside/`, one folder per run, at the time of the request. A
gallery that is sent, served or opened from disk therefore needs no other folder, and updates by a
running run leave them unchanged.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, RootModel, Strict

from glm_grpo.gallery.thumbnails import shrink
from glm_grpo.run.folder import (
    RunFolder,
    atomic_directory,
    remove,
    storage_errors,
    write_atomically,
)
from glm_grpo.run.tables import check_stored, read_metrics

_FOLDER = "beside"
_LIST = "runs.json"


class ShownRun(BaseModel):
    """Another run as shown on the page.

    Attributes:
        name: Name to show.
        step: Step of its newest evaluation.
        alike: Terms whose scores are comparable with those of the main run.
        is_weighed_alike: Whether its totals use the weights of the main run; if not, they are as
            stored and not comparable.
        problem: What cannot be shown, and the remedy.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    step: Annotated[int, Strict(), Field(ge=0)]
    alike: tuple[str, ...]
    is_weighed_alike: bool
    problem: str | None


class _ShownRuns(RootModel[tuple[ShownRun, ...]]):
    """`gallery/beside/runs.json`, in the order of the columns."""


@dataclass(frozen=True)
class OtherRun:
    """Another run to show.

    Attributes:
        folder: Folder of its pictures.
        groups: Prompts that the main run has too, in the form of its data files; `images` are
            relative to `images/` of `folder`, targets and sources are those of the main run.
        shown: What the page shows about it.
    """

    folder: RunFolder
    groups: tuple[dict[str, Any], ...]
    shown: ShownRun


def data_key(number: int) -> str:
    """Key of the data file of another run; numbers start at 1."""
    return f"{_FOLDER}-{number}"


def read_beside(folder: RunFolder) -> tuple[ShownRun, ...]:
    """Other runs that a gallery shows, in order; may be empty.

    Raises:
        StorageError: The list is damaged, or cannot be read.
    """
    path = list_path(folder)
    if not path.exists():
        return ()
    with storage_errors("read", path):
        content = path.read_bytes()
    return check_stored(_ShownRuns, content, str(path)).root


def list_path(folder: RunFolder) -> Path:
    """Path of the list of other runs that a gallery shows."""
    return folder.path / f"gallery/{_FOLDER}/{_LIST}"


def keep_beside(folder: RunFolder, others: Sequence[OtherRun]) -> dict[str, dict[str, Any]]:
    """Copy pictures of other runs into a gallery, replacing any earlier ones.

    A missing or damaged picture is left out, and the page shows that it is missing.

    Args:
        folder: Run whose gallery it is.
        others: Runs in the order of their columns; may be empty.

    Returns:
        Contents of each run's data file, by its key.

    Raises:
        StorageError: Writing failed, for instance on a full or read-only disk, or the metrics of
            another run are damaged.
    """
    directory = folder.path / f"gallery/{_FOLDER}"
    if not others:
        if directory.exists():
            remove(directory)
        return {}
    data = {}
    with atomic_directory(directory) as temporary:
        for number, other in enumerate(others, start=1):
            for group in other.groups:
                for image in group["images"]:
                    _take(other.folder.picture(f"images/{image}"), temporary / str(number) / image)
            groups = [_placed(group, f"{_FOLDER}/{number}") for group in other.groups]
            data[data_key(number)] = {
                "step": other.shown.step,
                "groups": groups,
                "metrics": read_metrics(other.folder),
            }
        content = _ShownRuns(tuple(other.shown for other in others)).model_dump_json(indent=1)
        write_atomically(temporary / _LIST, content.encode())
    return data


def _placed(group: dict[str, Any], place: str) -> dict[str, Any]:
    return group | {"images": [f"{place}/{image}" for image in group["images"]]}


def _take(source: Path, target: Path) -> None:
    """Copy a picture and its thumbnail into a gallery."""
    thumbnail = shrink(source)
    if thumbnail is None:
        return
    if target.exists():
        # A table names it twice, or it is the thumbnail of another picture.
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    stored = os.path.realpath(source)
    try:
        # A link saves disk space. It is safe because stored pictures are replaced, never modified.
        os.link(stored, target)
    except OSError:
        # The other run is on another disk, or the disk has no hard links.
        shutil.copyfile(stored, target)
    small = target.with_suffix(".webp")
    # Unlink before writing: if a table names a .webp, this is a link to the other run's file.
    small.unlink(missing_ok=True)
    small.write_bytes(thumbnail.content)
