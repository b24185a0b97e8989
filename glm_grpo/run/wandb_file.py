"""Reads what W&B keeps of a run offline: it has no reader of its own."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER = 7
_BLOCK = 32768
_PART = struct.Struct("<IHB")
"""Checksum, length and kind of a part of a record, which no block cuts."""
_WHOLE, _LAST = 1, 4
"""Kinds of the parts that a record ends with."""


def wandb_records(path: Path) -> Iterator[Any]:
    """Whole records of a `.wandb` file, as `wandb_internal.Record`; one torn by a kill ends them.

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
    """The last step in a `.wandb` file; -1 where there is none."""
    records = wandb_records(path)
    steps = (record.history.step.num for record in records if record.HasField("history"))
    return max(steps, default=-1)
