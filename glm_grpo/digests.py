"""Digests of contents, by which a later run notices that something changed under its name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BYTES = 8
"""Length of a digest; enough to notice changes that nobody made on purpose."""

_MIB = 2**20
_LARGEST_WHOLE = 64 * _MIB
"""Bytes of a file that are all read; of a larger one, `_SAMPLES` pieces of 1 MiB each."""
_SAMPLES = 16


def digest(*contents: bytes) -> str:
    """BLAKE2b over contents, with their lengths; 16 hexadecimal digits."""
    found = hashlib.blake2b(digest_size=_BYTES)
    for content in contents:
        found.update(len(content).to_bytes(8, "big"))
        found.update(content)
    return found.hexdigest()


def digest_files(path: Path) -> str:
    """Digest of a file, or of the files of a folder with their names, but for hidden ones and .md.

    Of files above 64 MiB, only the size and 16 evenly spaced pieces of 1 MiB are read: weights that
    were trained differ everywhere, and a model of 36 GB takes less than a second.

    Raises:
        OSError: A file cannot be read.
    """
    if not path.is_dir():
        return digest(_read(path))
    files = {
        each.relative_to(path).as_posix(): each
        for folder, _, names in os.walk(path, followlinks=True)
        for each in (Path(folder, name) for name in names)
    }
    # Downloads keep their own records in hidden folders.
    read = sorted(name for name in files if not name.startswith(".") and not name.endswith(".md"))
    return digest(*(part for name in read for part in (name.encode(), _read(files[name]))))


def _read(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _LARGEST_WHOLE:
            return file.read()
        pieces = [str(size).encode()]
        for number in range(_SAMPLES):
            file.seek(number * (size - _MIB) // (_SAMPLES - 1))
            pieces.append(file.read(_MIB))
    return b"".join(pieces)
