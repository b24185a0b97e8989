"""Whole runs of the embedded Janus, from `init` to an export."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import JanusForConditionalGeneration

from glm_grpo import load_config, train
from glm_grpo.cli import main
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_table
from tests.end_to_end.distributed.conftest import assert_same_metrics
from tests.end_to_end.runs import read_record

SMALL = (
    *("rollout.prompts_per_step=2", "rollout.group_size=4", "train.micro_batch_size=8"),
    *("train.checkpoint_every=1", "train.eval_every=2", "train.keep_checkpoints=9", "trackers=[]"),
    *("eval.samples_per_prompt=2", "optim.schedule=constant", "optim.warmup_steps=0"),
    "model.adapter={rank: 4, alpha: 8.0}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A starter folder with few held-out prompts."""
    folder = tmp_path_factory.mktemp("work") / "objects"
    main(["init", str(folder), "--config-name", "tiny_objects"])
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[::4]))
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    words = (*SMALL, "train.steps=2", "advantage.credit=place", f"run_dir={folder / 'run'}")
    return train(load_config("config", *words, config_dir=folder))


def test_init_writes_rows_in_genevals_form_with_images(folder):
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]

    assert {"counting", "position", "color_attr", "objects"} <= {row["tag"] for row in rows}
    assert all(row["include"] for row in rows)
    assert Image.open(folder / rows[0]["target"]).size == (128, 128)


def test_a_run_credits_shapes_where_they_stand(finished):
    table = read_table(RunFolder(finished.path).rollout_path(2)).to_pydict()

    pieces, credits = table["pieces/composition"], table["credit"]
    assert {"sure:0", "colour:0"} <= {box["kind"] for boxes in pieces for box in boxes}
    credited = 0
    for boxes, credit in zip(pieces, credits, strict=True):
        in_boxes = {
            (row, column)
            for row, column in itertools.product(range(8), repeat=2)
            for box in boxes
            if box["left"] < 16 * (column + 1) and 16 * column < box["right"]
            if box["top"] < 16 * (row + 1) and 16 * row < box["bottom"]
        }
        found = {
            (row, column)
            for row, line in enumerate(credit)
            for column, each in enumerate(line)
            if each
        }
        assert found <= in_boxes
        credited += len(found)
    assert credited > 0


def test_a_run_goes_on_as_if_it_had_not_stopped(folder, finished):
    words = (*SMALL, "advantage.credit=place", f"run_dir={folder / 'parts'}")
    train(load_config("config", *words, "train.steps=1", config_dir=folder))
    train(load_config("config", *words, "train.steps=2", "train.resume=auto", config_dir=folder))

    whole, parts = (read_record(folder / name)["metrics"] for name in ("run", "parts"))
    assert parts[-1] == whole[-1]


@pytest.mark.timeout(900)
def test_two_processes_credit_shapes_as_one_does(folder, programs, configs_dir):
    words = (
        *("--config-name", "tiny_objects", *SMALL, "train.steps=2", "advantage.credit=place"),
        *(f"data.path={folder / 'prompts.jsonl'}", f"data.eval_path={folder / 'held_out.jsonl'}"),
        # Three prompts are unequal parts. With a large epsilon, Adam's first updates are no signs.
        *("rollout.prompts_per_step=3", "train.micro_batch_size=4", "optim.epsilon=1e-3"),
    )
    script = str(configs_dir.parent / "train.py")
    for name, count in (("one", 1), ("two", 2)):
        started = programs.start_team(count, folder, script, *words, f"run_dir={folder / name}")
        assert [each.wait(400.0) for each in started] == [0] * count, started[0].said()

    assert_same_metrics(folder / "two", folder / "one")
    for step in (1, 2):
        tables = [
            read_table(RunFolder(folder / name).rollout_path(step)) for name in ("one", "two")
        ]
        ours, theirs = (table.to_pylist() for table in tables)
        for own, other in zip(ours, theirs, strict=True):
            for exact in ("prompt_id", "sample", "token_ids", "note/composition"):
                assert own[exact] == other[exact]
            for close in ("credit", "pieces/composition"):
                assert flat(own[close]) == pytest.approx(flat(other[close]), abs=1e-4)
        # Shapes of all prompts earned something.
        credited = {row["prompt_id"] for row in ours if any(flat(row["credit"]))}
        assert len(credited) == 3


def flat(value: Any) -> list[Any]:
    """What nested lists and mappings hold, in order."""
    if isinstance(value, dict):
        value = [*value.values()]
    return [part for each in value for part in flat(each)] if isinstance(value, list) else [value]


def test_the_page_of_an_adapter_draws_with_stock_classes(finished, tmp_path, monkeypatch):
    main(["export", str(finished.path), str(tmp_path / "adapter")])
    card = (tmp_path / "adapter" / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)

    monkeypatch.chdir(tmp_path / "adapter")
    names: dict[str, Any] = {}
    exec(program, names)

    assert isinstance(names["model"], JanusForConditionalGeneration)
    assert Image.open("image.png").size == (128, 128)
    assert "deepseek" not in card.lower()
