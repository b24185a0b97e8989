"""Pack a run's gallery and pictures into one file for sharing."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from glm_grpo.run.folder import RunFolder, storage_errors

_PARTS = ("gallery", "images")
_PICTURES = {".png", ".webp"}
"""Suffixes of files that are compressed already."""


def write_archive(folder: RunFolder, path: Path) -> None:
    """Write a zip of `gallery/` and `images/` atomically, in a folder with the run's name.

    Args:
        folder: Run folder with its gallery.
        path: Path of the zip; parent folders are created, an earlier file is replaced.

    Raises:
        StorageError: A file cannot be read, or writing failed, for instance on a full or read-only
            disk.
    """
    # A zip cannot store names that are not UTF-8.
    top = folder.path.resolve().name.encode("utf-8", "replace").decode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                # A zip cannot store times before 1980 either.
                with zipfile.ZipFile(file, "w", strict_timestamps=False) as archive:
                    for source in _files(folder, without=path.resolve()):
                        name = source.relative_to(folder.path).as_posix()
                        entry = zipfile.ZipInfo.from_file(
                            source, f"{top}/{name}", strict_timestamps=False
                        )
                        entry.compress_type = _compression(source)
                        with source.open("rb") as content, archive.open(entry, "w") as packed:
                            shutil.copyfileobj(content, packed)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _files(folder: RunFolder, *, without: Path) -> Iterator[Path]:
    """All files to pack, without half-written files and earlier archives.

    The target of a link is packed only if it is in the same folder.
    """
    for part in _PARTS:
        top = (folder.path / part).resolve()
        for path in sorted((folder.path / part).rglob("*")):
            is_hidden = any(part.startswith(".") for part in path.relative_to(folder.path).parts)
            target = path.resolve()
            is_wanted = target.is_relative_to(top) and target != without
            if path.is_file() and not is_hidden and is_wanted:
                yield path


def _compression(path: Path) -> int:
    return zipfile.ZIP_STORED if path.suffix in _PICTURES else zipfile.ZIP_DEFLATED
