"""Small versions of a run's pictures for its pages."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder, read_picture, storage_errors, write_atomically

LONGER_SIDE = 384
"""Pixels of the longer side of a thumbnail, at most."""
_WHOLE_SIDE = 256
"""Pixels up to which a picture is kept as it is: small ones are shown enlarged, pixel by pixel."""
_QUALITY = 80
_METHOD = 1
"""Of WebP, 0 (fastest) to 6: training waits."""


@dataclass(frozen=True)
class Thumbnail:
    """A small version of a picture.

    Attributes:
        content: WebP.
        width: Pixels.
    """

    content: bytes
    width: int


def thumbnail_name(image: str) -> str:
    """Path below `thumbs/` of the thumbnail of a picture, whose path is relative to `images/`."""
    return f"{image.removesuffix('.png')}.webp"


def make_thumbnails(folder: RunFolder, images: Iterable[str]) -> None:
    """Write the thumbnails that are missing, or of pictures that have changed since.

    A picture that is missing or damaged gets none, and keeps one that was made before.

    Args:
        folder: The run.
        images: Paths relative to `images/`.

    Raises:
        StorageError: A picture lies outside the run folder, or the disk is full, read-only or
            otherwise refuses.
    """
    for image in dict.fromkeys(images):
        source = folder.picture(f"images/{image}")
        target = folder.path / f"gallery/thumbs/{thumbnail_name(image)}"
        # Not Path.is_file, which raises where a name is too long.
        if not os.path.isfile(source):
            continue
        made = source.stat().st_mtime_ns
        if target.is_file() and target.stat().st_mtime_ns == made:
            continue
        thumbnail = shrink(source)
        if thumbnail is not None:
            write_atomically(target, thumbnail.content)
            with storage_errors("write", target):
                # The picture's own: under a clock that jumps, the older file can be the later one.
                os.utime(target, ns=(made, made))


def shrink(path: Path) -> Thumbnail | None:
    """The thumbnail of a picture; None where the file holds no whole picture."""
    content = io.BytesIO()
    try:
        picture = read_picture(path)
    except StorageError:
        return None
    if max(picture.size) <= _WHOLE_SIDE:
        picture.save(content, format="WEBP", lossless=True, quality=0, method=0)
    else:
        picture.thumbnail((LONGER_SIDE, LONGER_SIDE), reducing_gap=2.0)
        picture.save(content, format="WEBP", quality=_QUALITY, method=_METHOD)
    return Thumbnail(content.getvalue(), picture.width)
