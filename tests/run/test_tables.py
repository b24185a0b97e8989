"""What a run stored, read back: one damaged example of each kind of file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from glm_grpo.errors import ConfigError, GlmGrpoError, StorageError
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import (
    METADATA_KEY,
    Weighing,
    read_bands,
    read_metrics,
    read_run_ids,
    read_table,
    read_weighing,
    weighing_metadata,
)


@pytest.mark.parametrize(
    ("read", "name", "content", "message"),
    [
        (read_metrics, "metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 3}\n', "line 2 of .*"),
        (read_metrics, "metrics.jsonl", b'{"step": 1, "loss": "text"}\n', r"loss\..* is 'text'"),
        (read_bands, "canaries.json", b'{"seen": {"mean": 1}}', "seen.std is"),
        (read_run_ids, "trackers.json", b'{"wandb": 3}', "wandb is 3"),
        (read_config, "config.yaml", b"model: {path: '\xed\xa0\x80'}", "UTF-8"),
        (read_config, "config.yaml", b"rollout: [", "line 2"),
    ],
)
def test_damaged_file_is_refused_by_name(
    read: Callable[[RunFolder], object], name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GlmGrpoError, match=message) as refused:
        read(RunFolder(tmp_path))
    assert isinstance(refused.value, ConfigError if name == "config.yaml" else StorageError)
    assert str(tmp_path / name) in str(refused.value)


def test_files_that_a_run_has_not_written_yet_are_empty(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert (read_metrics(folder), read_bands(folder), read_run_ids(folder)) == ([], None, {})


def test_metrics_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": null, "b": 7, "c": 0.5, "d": 2.0}\n')
    (row,) = read_metrics(RunFolder(tmp_path))
    assert row == {"step": 1, "a": None, "b": 7, "c": 0.5, "d": 2.0}
    # So that a resumed run leaves the same file.
    assert [type(row[name]) for name in "bd"] == [int, float]


@pytest.mark.parametrize(
    "lines",
    [
        # Until version 0.2, an evaluation was added to the line of its step.
        [
            '{"step": 0, "eval/total": 0.25}',
            '{"step": 1, "canary/departures": 1.0, "eval/total": null}',
            '{"step": 2, "canary/departures": 0.0}',
        ],
        [
            '{"step": 0, "eval/total": 0.25}',
            '{"step": 1, "canary/departures": 0.0}',
            '{"step": 1, "eval/total": null, "canary/departures": 1.0}',
            '{"step": 2, "canary/departures": 0.0}',
            '{"step": 2, "eval/to',
        ],
    ],
    ids=["a line per step", "a line per evaluation, the last one cut off"],
)
def test_metrics_are_a_row_per_step(lines: list[str], tmp_path: Path) -> None:
    whole = [*lines, ""] if lines[-1].endswith("}") else lines
    (tmp_path / "metrics.jsonl").write_text("\n".join(whole))
    assert read_metrics(RunFolder(tmp_path)) == [
        {"step": 0, "eval/total": 0.25},
        {"step": 1, "canary/departures": 1.0, "eval/total": None},
        {"step": 2, "canary/departures": 0.0},
    ]


TABLE = pyarrow.table(
    {
        "step": pyarrow.array([7, 7], pyarrow.int32()),
        "token_ids": pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int32())),
        "raw/ocr": pyarrow.array([0.5, None], pyarrow.float32()),
        "total": pyarrow.array([0.5, 0.25], pyarrow.float32()),
        "target": pyarrow.array([None, "images/targets/a.png"]),
        "image": pyarrow.array(["images/step-000007/0.png", "images/step-000007/1.png"]),
    }
)
WEIGHING = Weighing({"ocr": 0.5}, {"ocr": 0.125}, "weighted_sum")


def store(folder: Path, table: pyarrow.Table, **metadata: object) -> Path:
    """As table of step 7, its metadata changed."""
    content = json.loads(weighing_metadata(WEIGHING)[METADATA_KEY]) | metadata
    path = RunFolder(folder).rollout_path(7)
    path.parent.mkdir()
    other = table.replace_schema_metadata({METADATA_KEY: json.dumps(content)})
    pyarrow.parquet.write_table(other, path)
    return path


def test_read_table_gives_columns_and_weights_as_written(tmp_path: Path) -> None:
    path = store(tmp_path, TABLE)
    assert read_table(path).to_pydict() == TABLE.to_pydict()
    assert read_table(path, ["total", "raw/"]).column_names == ["total", "raw/ocr"]
    assert read_weighing(path) == WEIGHING


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"schema": 1}, "schema 1.* 2"),
        ({"combine": "product"}, "combine is 'product'"),
    ],
)
def test_tables_of_another_version_or_weighing_are_refused(
    metadata: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = store(tmp_path, TABLE, **metadata)
    for read in (read_table, read_weighing):
        with pytest.raises(StorageError, match=rf"step-000007\.parquet.*{message}"):
            read(path)


def test_tables_that_are_torn_or_of_another_project_are_refused(tmp_path: Path) -> None:
    path = store(tmp_path, TABLE)
    pyarrow.parquet.write_table(TABLE, path)
    with pytest.raises(StorageError, match=r"step-000007\.parquet .*metadata"):
        read_table(path)
    path.write_bytes(b"PAR1 not a table")
    for read in (read_table, read_weighing):
        with pytest.raises(StorageError, match=r"step-000007\.parquet .*Parquet"):
            read(path)
