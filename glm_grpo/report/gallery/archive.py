"""A run's gallery and pictures as one file, to be sent to someone."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from glm_grpo.storage import RunFolder, storage_errors

_PARTS = ("gallery", "images")
_PICTURES = {".png", ".webp"}
"""Compressed as they are."""


def write_archive(folder: RunFolder, path: Path) -> None:
    """Write a zip of `gallery/` and `images/`, in a folder of the run's name, whole or not at all.

    Args:
        folder: The run, its gallery written.
        path: Of the zip; its parent folders are made, an earlier file is replaced.

    Raises:
        StorageError: A file cannot be read, or the disk is full, read-only or otherwise refuses.
    """
    # A name that is no UTF-8 has no form in a zip.
    top = folder.path.resolve().name.encode("utf-8", "replace").decode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                # Times before 1980 have no form in a zip either.
                with zipfile.ZipFile(file, "w", strict_timestamps=False) as archive:
                    for source in _files(folder, without=path.resolve()):
                        name = f"{top}/{source.relative_to(folder.path).as_posix()}"
                        archive.write(source, name, _compression(source))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _files(folder: RunFolder, *, without: Path) -> Iterator[Path]:
    """All files to be packed; not those that are half written, and not an earlier archive.

    Not what a link outside the folders leads to either: it would be sent along unseen.
    """
    for part in _PARTS:
        top = (folder.path / part).resolve()
        for path in sorted((folder.path / part).rglob("*")):
            is_hidden = any(name.startswith(".") for name in path.relative_to(folder.path).parts)
            target = path.resolve()
            is_wanted = target.is_relative_to(top) and target != without
            if path.is_file() and not is_hidden and is_wanted:
                yield path


def _compression(path: Path) -> int:
    return zipfile.ZIP_STORED if path.suffix in _PICTURES else zipfile.ZIP_DEFLATED
