"""Other runs in a gallery: the held-out pictures of their newest evaluations, beside the run's own.

They are kept in `gallery/beside/`, a folder a run, as they were when they were asked for. So a
gallery that is sent, served or opened from disk reaches no other folder, and an update by a run
that goes on leaves them where they are.
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
from glm_grpo.run.tables import check_stored

_FOLDER = "beside"
_LIST = "runs.json"


class ShownRun(BaseModel):
    """Another run as the page shows it.

    Attributes:
        name: What to call it.
        step: Of its newest evaluation.
        alike: Terms whose scores compare with those of the run itself.
        is_weighed_alike: Whether its totals follow from the weights of the run itself; if not they
            are as it stored them, and do not compare.
        problem: What is not shown, and the remedy.
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
    """Another run that is to be shown.

    Attributes:
        folder: Where its pictures are.
        groups: Prompts that the run itself has too, as its data files hold them; `images` are below
            `images/` of `folder`, targets and sources those of the run itself.
        shown: What the page says of it.
    """

    folder: RunFolder
    groups: tuple[dict[str, Any], ...]
    shown: ShownRun


def data_key(number: int) -> str:
    """Key of the data file of another run, which are counted from 1."""
    return f"{_FOLDER}-{number}"


def read_beside(folder: RunFolder) -> tuple[ShownRun, ...]:
    """The other runs that a gallery shows, in order; none without any.

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
    """Where the other runs that a gallery shows are listed."""
    return folder.path / f"gallery/{_FOLDER}/{_LIST}"


def keep_beside(folder: RunFolder, others: Sequence[OtherRun]) -> dict[str, dict[str, Any]]:
    """Keep pictures of other runs in a gallery, instead of any that were kept there.

    A picture that is missing or damaged is left out, and said to be missing on the page.

    Args:
        folder: The run whose gallery it is.
        others: In the order of their columns; may be empty.

    Returns:
        What the data file of each run holds, by its key.

    Raises:
        StorageError: The disk is full, read-only or otherwise refuses.
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
            data[data_key(number)] = {"step": other.shown.step, "groups": groups}
        content = _ShownRuns(tuple(other.shown for other in others)).model_dump_json(indent=1)
        write_atomically(temporary / _LIST, content.encode())
    return data


def _placed(group: dict[str, Any], place: str) -> dict[str, Any]:
    return group | {"images": [f"{place}/{image}" for image in group["images"]]}


def _take(source: Path, target: Path) -> None:
    """Put a picture and its thumbnail into a gallery."""
    thumbnail = shrink(source)
    if thumbnail is None:
        return
    if target.exists():
        # Named twice by a table, or as the thumbnail of another.
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    stored = os.path.realpath(source)
    try:
        # No second copy on the disk. A stored picture is replaced, never written to.
        os.link(stored, target)
    except OSError:
        # Of another disk, or one that knows no links.
        shutil.copyfile(stored, target)
    small = target.with_suffix(".webp")
    # Never written to: where a table names a .webp, this is the link to the other run's own file.
    small.unlink(missing_ok=True)
    small.write_bytes(thumbnail.content)
