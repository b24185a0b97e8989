"""A run's gallery and pictures as one file, to be sent to someone."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from glm_grpo.run.folder import RunFolder, storage_errors

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
    """All files to be packed; not those that are half written, and not an earlier archive.

    What a link leads to is packed only where it lies in the same folder.
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
