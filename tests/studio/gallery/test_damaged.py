"""What is missing, torn or of another version is said in its place, and the rest is shown."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from glm_grpo.errors import StorageError
from glm_grpo.studio.gallery import update_gallery, write_gallery


def change(path: Path, name: str, values: pyarrow.Array) -> None:
    """Put another column in the place of one in a stored table."""
    table = pyarrow.parquet.read_table(path)
    index = table.column_names.index(name)
    pyarrow.parquet.write_table(table.set_column(index, name, values), path)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def set_schema(path: Path, metadata: dict[str, str]) -> None:
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def drop_total(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns(["total"]), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (tear, "is not a complete Parquet file"),
        (lambda path: set_schema(path, {"glm_grpo": '{"schema": 99}'}), "has schema 99, and this"),
        (drop_total, "has no column total"),
        (
            lambda path: change(
                path, "raw/lpips", pyarrow.array([0.5, None, None, None], pyarrow.float32())
            ),
            r"is damaged \(numbers are missing or not finite",
        ),
    ],
)
def test_damaged_table_is_said_in_its_place(damage: Any, message: str, run: Any) -> None:
    for step in (1, 2):
        run.record_step(step)
        run.record_evaluation(step)
    damage(run.folder.rollout_path(1))
    damage(run.folder.evaluation_path(2))

    write_gallery(run.folder, ())

    damaged, whole = run.data("steps-000001")["steps"]
    evaluations = [run.data(f"evaluation-00000{step}") for step in (1, 2)]
    for entry in (damaged, evaluations[1]):
        assert set(entry) == {"step", "problem"}
        assert re.search(message, entry["problem"])
        assert str(run.folder.path) not in entry["problem"]
    for entry in (whole, evaluations[0]):
        assert set(entry) == {"step", "groups"}
    assert run.data("run")["problems"] == []
    assert [row["step"] for row in run.data("steps-000001")["metrics"]] == [1, 2]


def test_missing_config_leaves_what_the_tables_tell(run: Any) -> None:
    run.record_step(1)
    run.folder.config_path.unlink()
    write_gallery(run.folder, ())
    data = run.data("run")
    assert data["reward"] == {
        "combine": "weighted_sum",
        "terms": [
            {"name": "lpips", "kind": "lpips", "weight": 0.4, "std_floor": 0.0001},
            {"name": "ssim", "kind": "ssim", "weight": 0.2, "std_floor": 0.0001},
            {"name": "ocr", "kind": "ocr", "weight": 0.3, "std_floor": 0.0001},
            {"name": "aesthetic", "kind": "aesthetic", "weight": 0.1, "std_floor": 0.0001},
        ],
        "watch": [],
    }
    unknown = ("advantage", "group_size", "image_size", "steps_planned", "canary_margin", "config")
    assert [data[name] for name in (*unknown, "label")] == [None] * 7
    (problem,) = data["problems"]
    assert problem["where"] == "config.yaml"
    assert problem["message"].startswith("Cannot read config.yaml: No such file or directory")
    group = run.data("steps-000001")["steps"][0]["groups"][0]
    assert group["notes"]["ocr"][0]["marks"] == [["OP", True], ["F", False], ["N", True]]


def test_config_that_is_refused_is_shown_as_it_is(run: Any) -> None:
    run.record_step(1)
    run.folder.config_path.write_text("rollout: [")
    write_gallery(run.folder, ())
    data = run.data("run")
    assert [problem["where"] for problem in data["problems"]] == ["config.yaml"]
    assert data["config"] == "rollout: ["
    names = [term["name"] for term in data["reward"]["terms"]]
    assert names == ["lpips", "ssim", "ocr", "aesthetic"]


def test_damaged_metrics_and_bands_leave_the_images(run: Any) -> None:
    run.record_step(1)
    run.folder.metrics_path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    run.folder.canaries_path.write_text('{"a": {"mean": 1}}')
    write_gallery(run.folder, ())
    data = run.data("run")
    problems = {problem["where"]: problem["message"] for problem in data["problems"]}
    assert set(problems) == {"metrics.jsonl", "canaries.json"}
    assert "line 2 of metrics.jsonl is damaged" in problems["metrics.jsonl"]
    assert data["bands"] is None
    chunk = run.data("steps-000001")
    assert chunk["metrics"] == []
    assert len(chunk["steps"][0]["groups"]) == 2


def test_missing_images_have_no_thumbnails(run: Any) -> None:
    run.record_step(1)
    (run.folder.image_dir(1) / "kite-0.png").unlink()
    write_gallery(run.folder, ())
    assert "step-000001/kite-0.webp" not in run.files("thumbs")
    assert "step-000001/kite-1.webp" in run.files("thumbs")
    group = run.data("steps-000001")["steps"][0]["groups"][0]
    assert group["images"] == ["step-000001/kite-0.png", "step-000001/kite-1.png"]


def test_run_that_stored_nothing_has_a_gallery(run: Any) -> None:
    run.folder.config_path.unlink()
    page = write_gallery(run.folder, ())
    assert page == run.folder.gallery_path
    data = run.data("run")
    assert data["chunks"] == data["evaluations"] == []


def test_full_disk_is_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run.record_step(1)
    write_gallery(run.folder, ())

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="No space left on device"):
        update_gallery(run.folder, 1)
