"""Make small versions of a run's images for its pages."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder, read_image, storage_errors, write_atomically

LONGER_SIDE = 384
"""Largest size of a thumbnail's longer side, pixels."""
_WHOLE_SIDE = 256
"""Side in pixels up to which an image is not shrunk; pages enlarge such images pixel by
pixel."""
_QUALITY = 80
_METHOD = 1
"""Effort of the WebP encoder, 0 (fastest) to 6; training waits for it."""


@dataclass(frozen=True)
class Thumbnail:
    """A small version of an image.

    Attributes:
        content: WebP file.
    """

    content: bytes
    width: int


def thumbnail_name(image: str) -> str:
    """Path, relative to `thumbs/`, of the thumbnail of an image given relative to `images/`."""
    return f"{image.removesuffix('.png')}.webp"


def make_thumbnails(folder: RunFolder, images: Iterable[str]) -> None:
    """Write the thumbnails of new and changed images.

    Missing or damaged images get none, and keep an earlier one.

    Args:
        images: Paths relative to `images/`.
    """
    for image in dict.fromkeys(images):
        source = folder.image_path(f"images/{image}")
        target = folder.path / f"gallery/thumbs/{thumbnail_name(image)}"
        # Not Path.is_file, which raises an error for names that are too long.
        if not os.path.isfile(source):
            continue
        made = source.stat().st_mtime_ns
        if target.is_file() and target.stat().st_mtime_ns == made:
            continue
        thumbnail = shrink(source)
        if thumbnail is not None:
            write_atomically(target, thumbnail.content)
            with storage_errors("write", target):
                # The image's own time, because an unsteady clock can give the older file the
                # later time.
                os.utime(target, ns=(made, made))


def shrink(path: Path) -> Thumbnail | None:
    """Make a thumbnail; None if the file is not an intact image."""
    content = io.BytesIO()
    try:
        image = read_image(path)
    except StorageError:
        return None
    if max(image.size) <= _WHOLE_SIDE:
        image.save(content, format="WEBP", lossless=True, quality=0, method=0)
    else:
        image.thumbnail((LONGER_SIDE, LONGER_SIDE), reducing_gap=2.0)
        image.save(content, format="WEBP", quality=_QUALITY, method=_METHOD)
    return Thumbnail(content.getvalue(), image.width)
