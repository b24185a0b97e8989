"""Read W&B's offline files, for which W&B has no reader."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER = 7
_BLOCK = 32768
_PART = struct.Struct("<IHB")
"""Checksum, length and kind of a part of a record; blocks never split this header."""
_WHOLE, _LAST = 1, 4
"""Kinds of parts that end a record."""


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield intact records of a `.wandb` file as `wandb_internal.Record`, up to a truncated one.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    record_class = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    content, position, record = path.read_bytes(), _FILE_HEADER, b""
    while position + _PART.size <= len(content):
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < _PART.size:
            position += left_in_block
            continue
        _, length, kind = _PART.unpack_from(content, position)
        start = position + _PART.size
        position = start + length
        if position > len(content):
            return
        record += content[start:position]
        if kind in (_WHOLE, _LAST):
            yield record_class.FromString(record)
            record = b""


def last_wandb_step(path: Path) -> int:
    """Last step in a `.wandb` file; -1 if there is none."""
    records = wandb_records(path)
    steps = (record.history.step.num for record in records if record.HasField("history"))
    return max(steps, default=-1)
