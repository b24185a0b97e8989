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
from glm_grpo.gallery import update_gallery, write_gallery


def change(path: Path, name: str, values: pyarrow.Array) -> None:
    """Put another column in the place of one in a stored table."""
    table = pyarrow.parquet.read_table(path)
    index = table.column_names.index(name)
    pyarrow.parquet.write_table(table.set_column(index, name, values), path)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def overwrite_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)


def set_schema(path: Path, metadata: dict[str, str] | None) -> None:
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def drop_total(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns(["total"]), path)


NOTHING = pyarrow.nulls(4)
DAMAGES = [
    (tear, "is not a whole Parquet file"),
    (overwrite_middle, "Restore a copy|Check the path|Remove it"),
    (lambda path: path.write_bytes(b""), "is not a whole Parquet file"),
    (lambda path: path.write_bytes(b"<html>"), "is not a whole Parquet file"),
    (lambda path: set_schema(path, {"glm_grpo": '{"schema": 99}'}), "has schema 99, and this"),
    (lambda path: set_schema(path, None), "has no glm_grpo metadata"),
    (drop_total, "has no column total"),
    (
        lambda path: change(path, "total", pyarrow.array([0.5, float("nan"), 0, 0])),
        r"is damaged \(total holds numbers that are not finite",
    ),
    (
        lambda path: change(path, "raw/lpips", pyarrow.array([0.5, None, None, None])),
        r"is damaged \(numbers are missing or not finite",
    ),
    (
        lambda path: change(path, "total", pyarrow.array(["a", "b", "c", "d"])),
        "is damaged .*Failed to parse string",
    ),
    (
        lambda path: change(path, "prompt", pyarrow.array(["a", None, "b", "b"])),
        "is damaged .*'prompt' with null values",
    ),
    (
        lambda path: change(path, "note/ocr", pyarrow.array([{"a": 1}] * 4)),
        "is damaged .*Unsupported cast",
    ),
    (
        lambda path: change(path, "is_flat" if "rollouts" in path.parts else "total", NOTHING),
        "is damaged .*with null values",
    ),
    (
        lambda path: change(
            path, "prompt", pyarrow.array([b"\xed\xa0\x80"] * 4).cast(pyarrow.string(), safe=False)
        ),
        "is damaged .*UTF8",
    ),
    (
        lambda path: change(path, "image", pyarrow.array(["images/../../x.png"] * 4)),
        r"'images/../../x.png' is not below images/",
    ),
    (
        lambda path: change(path, "target", pyarrow.array(["/etc/passwd"] * 4)),
        "'/etc/passwd' is not below images/",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
@pytest.mark.parametrize("kind", ["step", "evaluation"])
def test_damaged_table_is_said_in_its_place(damage: Any, message: str, kind: str, run: Any) -> None:
    for step in (1, 2, 3):
        run.record_step(step)
        run.record_evaluation(step)
    path = run.folder.rollout_path(1) if kind == "step" else run.folder.evaluation_path(1)
    damage(path)

    write_gallery(run.folder, ())

    steps = run.data("steps-000001")["steps"]
    evaluations = [run.data(f"evaluation-00000{step}") for step in (1, 2, 3)]
    entries, others = (steps, evaluations) if kind == "step" else (evaluations, steps)
    assert set(entries[0]) == {"step", "problem"}
    assert re.search(message, entries[0]["problem"])
    assert str(run.folder.path) not in entries[0]["problem"]
    for entry in (*entries[1:], *others):
        assert set(entry) == {"step", "groups"}
    assert run.data("run")["problems"] == []
    assert [row["step"] for row in run.data("steps-000001")["metrics"]] == [1, 2, 3]


@pytest.mark.parametrize("step", [1, 2])
def test_page_of_before_and_after_does_not_need_the_evaluations_it_shows(
    step: int, run: Any
) -> None:
    run.record_evaluation(1)
    run.record_evaluation(2)
    tear(run.folder.evaluation_path(step))
    write_gallery(run.folder, ())
    page = (run.gallery / "report.html").read_text()
    assert f"evaluations/step-00000{step}.parquet is not a whole Parquet file" in page


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
        "steering": {"share_rate": 0.3, "bound_rate": 0.1, "bound_max": 10.0},
        "watch": [],
    }
    unknown = ("advantage", "group_size", "picture", "steps_planned", "canary_margin", "config")
    assert [data[name] for name in (*unknown, "label")] == [None] * 7
    (problem,) = data["problems"]
    assert problem["where"] == "config.yaml"
    assert problem["message"].startswith("Cannot read config.yaml: No such file or directory")
    group = run.data("steps-000001")["steps"][0]["groups"][0]
    assert group["notes"]["ocr"][0]["marks"] == [["OP", True], ["F", False], ["N", True]]


@pytest.mark.parametrize(
    "text", ["rollout: [", "- a list", "unknown_key: 1", "model: {path: '\ud800'}", "\0"]
)
def test_config_that_is_refused_is_shown_as_it_is(text: str, run: Any) -> None:
    run.record_step(1)
    run.folder.config_path.write_bytes(text.encode("utf-8", "surrogatepass"))
    write_gallery(run.folder, ())
    data = run.data("run")
    assert [problem["where"] for problem in data["problems"]] == ["config.yaml"]
    assert data["config"] == text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    assert [term["name"] for term in data["reward"]["terms"]] == [
        "lpips",
        "ssim",
        "ocr",
        "aesthetic",
    ]


def test_missing_config_takes_the_weights_of_the_first_whole_table(run: Any) -> None:
    run.record_step(1)
    run.record_step(2)
    tear(run.folder.rollout_path(1))
    run.folder.config_path.unlink()
    write_gallery(run.folder, ())
    assert len(run.data("run")["reward"]["terms"]) == 4
    tear(run.folder.rollout_path(2))
    write_gallery(run.folder, ())
    assert run.data("run")["reward"]["terms"] == []


def test_line_torn_by_a_kill_is_left_out_of_the_metrics(run: Any) -> None:
    run.record_step(1)
    with run.folder.metrics_path.open("a") as file:
        file.write('{"step": 2, "rew')
    write_gallery(run.folder, ())
    assert run.data("run")["problems"] == []
    assert [row["step"] for row in run.data("steps-000001")["metrics"]] == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\n{"st\n{"step": 3}\n', "line 2 of metrics.jsonl is damaged"),
        ('{"loss": 1}\n', "line 1 of metrics.jsonl is damaged (step is"),
        ('{"step": 1.5}\n', "step is 1.5: Input should be a valid integer"),
        ('{"step": 1e400}\n', "step is inf: Input should be a valid integer"),
        ('{"step": "1"}\n', "step is '1': Input should be a valid integer"),
        ('{"step": 1, "loss": "x"}\n', "line 1 of metrics.jsonl is damaged (loss"),
        ("[1]\n", "line 1 of metrics.jsonl is damaged (the whole is [1]"),
        ("[" * 9000 + "]" * 9000 + "\n", "line 1 of metrics.jsonl is damaged (recursion limit"),
    ],
)
def test_damaged_metrics_leave_the_pictures(text: str, message: str, run: Any) -> None:
    run.record_step(1)
    run.folder.metrics_path.write_text(text)
    write_gallery(run.folder, ())
    (problem,) = run.data("run")["problems"]
    assert problem["where"] == "metrics.jsonl"
    assert message in problem["message"]
    chunk = run.data("steps-000001")
    assert chunk["metrics"] == []
    assert len(chunk["steps"][0]["groups"]) == 2


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"a": 1}',
        '{"a": {"mean": 1}}',
        '{"a": {"mean": NaN, "std": 1, "prompts": 2}}',
        '{"a": {"mean": "x", "std": 1, "prompts": 2}}',
    ],
)
def test_damaged_bands_are_a_problem(text: str, run: Any) -> None:
    run.folder.canaries_path.write_text(text)
    write_gallery(run.folder, ())
    data = run.data("run")
    assert data["bands"] is None
    assert [problem["where"] for problem in data["problems"]] == ["canaries.json"]


def test_missing_pictures_have_no_thumbnails(run: Any) -> None:
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


@pytest.mark.parametrize("write", [write_gallery, update_gallery])
def test_full_disk_is_said(write: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run.record_step(1)
    write_gallery(run.folder, ())

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="No space left on device"):
        write(run.folder, () if write is write_gallery else 1)
