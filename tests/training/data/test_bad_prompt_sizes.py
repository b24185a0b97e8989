"""Prompts files that would fill the memory.

Bounds: a file that is refused takes at most 256 MiB, whatever it holds; a million prompts take at
most 512 MiB.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from glm_grpo.errors import DataError
from glm_grpo.training.data.prompts import PromptSet
from tests.training.data.prompt_files import load, written

MEBIBYTE = 2**20


def table(**columns: object) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue()


def claiming_rows(count: int) -> bytes:
    """As many rows as are said to be there, in a few kilobytes."""
    indices = pyarrow.array(np.zeros(count, np.int8))
    return table(prompt=pyarrow.DictionaryArray.from_arrays(indices, ["x"]))


def long_line(path: Path, *, start: bytes = b"", end: bytes = b"") -> Path:
    with path.open("wb") as stream:
        stream.write(start)
        for _ in range(100):
            stream.write(b"a" * 1_000_000)
        stream.write(end)
    return path


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("a.txt", b"", b""),
        ("a.txt", b"a sign\n", b"\n"),
        ("a.jsonl", b'{"prompt": "', b'"}\n'),
        ("a.csv", b"prompt\n", b"\n"),
        ("a.csv", b'prompt\n"', b'"\n'),
    ],
)
def test_a_line_of_100_megabytes_is_refused_in_little_memory(
    tmp_path: Path,
    peak_memory: Callable[[Callable[[], object]], int],
    name: str,
    start: bytes,
    end: bytes,
) -> None:
    path = long_line(tmp_path / name, start=start, end=end)

    def refuse() -> None:
        with pytest.raises(DataError, match="longer than 4194304 bytes; end every row with a line"):
            load(path)

    assert peak_memory(refuse) < 64 * MEBIBYTE


def test_a_file_of_endless_zeros_is_refused_in_little_memory(
    tmp_path: Path, peak_memory: Callable[[Callable[[], object]], int]
) -> None:
    path = tmp_path / "a.txt"
    with path.open("wb") as stream:
        stream.truncate(10**12)  # a terabyte that takes no place on the disk

    def refuse() -> None:
        with pytest.raises(DataError, match="line 1: longer than"):
            load(path)

    assert peak_memory(refuse) < 64 * MEBIBYTE


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"prompt": "x", "a": [' + b"[]," * 1_390_000 + b"0]}"),
        ("a.jsonl", b'{"prompt": "x", "a": {' + b'"":0,' * 800_000 + b'"b":0}}'),
        ("a.csv", b",".join(b"c%d" % number for number in range(500_000)) + b"\n"),
        ("a.parquet", claiming_rows(10_000_001)),
    ],
    ids=["empty lists", "one key", "columns", "rows"],
)
def test_a_line_that_grows_when_it_is_read_stays_in_bounds(
    tmp_path: Path,
    peak_memory: Callable[[Callable[[], object]], int],
    name: str,
    content: bytes,
) -> None:
    path = written(tmp_path / name, content)

    def read() -> None:
        with contextlib.suppress(DataError):
            assert len(load(path)) == 1

    assert peak_memory(read) < 256 * MEBIBYTE


def test_a_hundred_thousand_prompts_are_read_in_their_share_of_memory(
    tmp_path: Path, peak_memory: Callable[[Callable[[], object]], int]
) -> None:
    # A tenth of the million that the bounds are stated for. The time has no bound of its own: it
    # is the machine's, and reading that compares every prompt with every other one does not end
    # within the test's.
    path = written(tmp_path / "a.txt", "a red sign\n" * 100_000)
    kept: list[PromptSet] = []
    peak = peak_memory(lambda: kept.append(load(path)))
    assert peak < 512 * MEBIBYTE / 10
    assert len(kept[0]) == 100_000
