from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from glm_grpo.config import Config, compose_config
from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.stored import read_evaluated_run, read_rollouts
from glm_grpo.run.tables import Weighing, weighing_metadata

NAMES = ("lpips", "ocr")
FLOATS = ("raw/lpips", "raw/ssim", "raw/ocr", "raw/aesthetic", "penalty", "total", "advantage")


def store(path: Path, rows: list[dict[str, Any]]) -> None:
    types = {"step": pyarrow.int32(), "sample": pyarrow.int32(), "target": pyarrow.string()}
    types |= dict.fromkeys(FLOATS, pyarrow.float32())
    columns = {
        name: pyarrow.array([row[name] for row in rows], types.get(name)) for name in rows[0]
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = weighing_metadata(Weighing({}, {}, "weighted_sum"))
    pyarrow.parquet.write_table(pyarrow.table(columns).replace_schema_metadata(metadata), path)


def make_rows(step: int, *prompt_ids: str, **scores: Any) -> list[dict[str, Any]]:
    """Two samples a prompt; row i of a step has ocr 0.25 i."""
    return [
        {
            "step": step,
            "prompt_id": prompt_id,
            "prompt": f"a sign, {prompt_id}",
            "sample": sample,
            "image": f"images/{step}/{prompt_id}-{sample}.png",
            "raw/lpips": None if prompt_id == "plain" else 0.5,
            "raw/ocr": 0.25 * (2 * index + sample),
            "penalty": 0.125 * sample,
            "total": float(step),
            "advantage": -float(step),
            **scores,
        }
        for index, prompt_id in enumerate(prompt_ids)
        for sample in range(2)
    ]


def test_read_rollouts_gives_every_group_of_every_step_in_order(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    # By name, though not by number, step 1000000 comes before step 999999.
    steps = ((999_999, ("a", "plain")), (1_000_000, ("plain", "b")), (1, ("b", "a")))
    for step, prompt_ids in steps:
        store(folder.rollout_path(step), make_rows(step, *prompt_ids))
    rollouts = read_rollouts(folder, NAMES, group_size=2)
    groups = rollouts.groups
    assert groups.steps.tolist() == [1, 1, 999_999, 999_999, 1_000_000, 1_000_000]
    assert groups.prompt_ids == ("b", "a", "a", "plain", "plain", "b")
    assert groups.prompts[3] == "a sign, plain"
    names = ("a-1.png", "plain-0.png", "plain-1.png")
    assert groups.images[5:8] == tuple(f"images/999999/{name}" for name in names)
    # The second group of each step has ocr 0.5 and 0.75; lpips does not apply to `plain`.
    assert groups.raw[2:4].tolist() == [[[0.5, 0.0], [0.5, 0.25]], [[0.0, 0.5], [0.0, 0.75]]]
    assert groups.is_applicable[2:4].tolist() == [[True, True], [False, True]]
    assert rollouts.penalty[2].tolist() == [0.0, 0.125]
    assert rollouts.totals[:, 0].tolist() == [1, 1, 999_999, 999_999, 1_000_000, 1_000_000]
    assert rollouts.advantages[2].tolist() == [-999_999, -999_999]


def test_weigh_takes_the_named_terms_in_the_order_of_the_weights(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store(folder.rollout_path(1), make_rows(1, "a", "plain"))
    groups = read_rollouts(folder, NAMES, group_size=2).groups
    table = groups.weigh({"ocr": 0.5, "lpips": 0.25}, {"lpips": 0.0625, "ocr": 0.125})
    assert table.names == ("ocr", "lpips")
    assert table.raw[0].tolist() == [[0.0, 0.5], [0.25, 0.5]]
    assert table.is_applicable.tolist() == [[True, True], [True, False]]
    assert table.weights.tolist() == [0.5, 0.25]
    assert table.std_floors.tolist() == [0.125, 0.0625]


def test_read_rollouts_refuses_a_run_without_any(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=rf"{tmp_path} .*rollouts/step-.*train\.method=sft"):
        read_rollouts(RunFolder(tmp_path), NAMES, group_size=2)


def test_read_rollouts_names_the_columns_that_are_missing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = make_rows(1, "a")
    for row in rows:
        del row["penalty"], row["raw/ocr"]
    store(folder.rollout_path(1), rows)
    with pytest.raises(StorageError, match=r"step-000001\.parquet .*raw/ocr, penalty"):
        read_rollouts(folder, NAMES, group_size=2)


def make_config(configs_dir: Path) -> Config:
    return compose_config(configs_dir, "tiny", ["eval.samples_per_prompt=2"])


def make_evaluation(step: int) -> list[dict[str, Any]]:
    rows = make_rows(step, "a", "plain", **{"raw/ssim": 0.5, "raw/aesthetic": 0.5})
    for row in rows:
        is_plain = row["prompt_id"] == "plain"
        row["texts"] = [] if is_plain else ["CAT", "24"]
        row["target"] = None if is_plain else "images/targets/a.png"
    return rows


def test_read_evaluated_run_gives_all_evaluations(tmp_path: Path, configs_dir: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (0, 20):
        store(folder.evaluation_path(step), make_evaluation(step))
    run = read_evaluated_run(folder, make_config(configs_dir), name="x")
    assert [evaluation.step for evaluation in run.evaluations] == [0, 20]
    last = run.evaluations[1]
    assert last.groups.steps.tolist() == [20, 20]
    assert last.texts == (("CAT", "24"), ())
    assert last.targets == ("images/targets/a.png", None)
    assert last.applies("lpips").tolist() == [True, False]
    # lpips of the prompt with a target alone; ocr 0, 0.25, 0.5 and 0.75.
    assert last.term_means(("ocr", "lpips")) == {"ocr": 0.375, "lpips": 0.5}


@pytest.mark.parametrize("count", [0, 1])
def test_read_evaluated_run_refuses_a_run_without_before_and_after(
    count: int, tmp_path: Path, configs_dir: Path
) -> None:
    folder = RunFolder(tmp_path)
    for step in range(count):
        store(folder.evaluation_path(step), make_evaluation(step))
    with pytest.raises(StorageError, match=f"{tmp_path} .*{count} evaluation"):
        read_evaluated_run(folder, make_config(configs_dir), name="x")
