"""Store what people think of a run's pictures: stars, rejections and notes in `marks.json`."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder, remove, storage_errors, write_atomically
from glm_grpo.run.tables import check_stored

LONGEST_NOTE = 2_000
"""Characters."""
_LONGEST_IMAGE = 300
"""Characters of a path relative to `images/`; folder and file have at most about 100."""


class Mark(BaseModel):
    """One person's opinion of one picture."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    verdict: Literal["star", "reject"] | None = None
    note: Annotated[str, Field(max_length=LONGEST_NOTE)] = ""

    @property
    def says_nothing(self) -> bool:
        """Whether there is neither a verdict nor a note."""
        return self.verdict is None and not self.note


class MarkChange(Mark):
    """New mark of a picture; an empty one removes the mark."""

    image: Annotated[str, Field(min_length=1, max_length=_LONGEST_IMAGE)]


class _Marks(RootModel[dict[str, Mark]]):
    """Schema of `marks.json`: marks by path relative to `images/`."""


def read_marks(folder: RunFolder) -> dict[str, Mark]:
    """Read all marks of a run, by path of the picture relative to `images/`; may be empty.

    Raises:
        StorageError: The file cannot be read or has other contents.
    """
    path = folder.marks_path
    if not path.exists():
        return {}
    with storage_errors("read", path):
        content = path.read_bytes()
    return check_stored(_Marks, content, str(path)).root


def change_mark(folder: RunFolder, change: MarkChange) -> None:
    """Store the mark of one picture; calls must not overlap.

    Raises:
        StorageError: The run has no such picture, or the file cannot be read or written.
    """
    picture = (folder.images_dir / change.image).resolve()
    if not picture.is_relative_to(folder.images_dir.resolve()) or not picture.is_file():
        raise StorageError(f"image {change.image!r} does not belong to the run; mark one that does")
    marks = read_marks(folder)
    marks.pop(change.image, None)
    if not change.says_nothing:
        marks[change.image] = Mark(verdict=change.verdict, note=change.note)
    if marks:
        write_atomically(folder.marks_path, to_json(marks))
    elif folder.marks_path.exists():
        remove(folder.marks_path)


def to_json(marks: dict[str, Mark]) -> bytes:
    """Contents of `marks.json`."""
    values = {image: marks[image].model_dump() for image in sorted(marks)}
    return (json.dumps(values, indent=1) + "\n").encode()
