"""The script for a card runs whole on the CPU, and goes on where a row fails."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks import gpu_card
from benchmarks.full_size.scale import FULL, Bench, make_batch
from glm_grpo.models.glm_image.files import PUBLISHED_ID
from glm_grpo.plan.devices import DEVICES

ROWS = {
    "machine": [""],
    "ceilings": ["bandwidth", "matrices", "from CPU memory"],
    "decoder": [
        "eager",
        "VAE, 1 at once",
        "VAE, 2 at once",
        "eager against the stock pipeline",
        "compiled, 4 letters",
        "compiled, 10 letters",
        "compiled, 28 letters",
        "compiled against eager",
        "compiled VAE, 1 at once",
        "compiled VAE, 2 at once",
        "eager, attention _native_math",
        "eager, rotary tables made in every pass",
    ],
    "token_step": ["compiled", "bf16 adapters", "fp32 adapters"],
    "update": [
        "compiled, checkpointing, micro-batch 2",
        "compiled, no checkpointing, micro-batch 2",
        "eager, checkpointing, micro-batch 2",
        "eager, no checkpointing, micro-batch 2",
    ],
    "whole_steps": ["two steps of a run"],
    "large_steps": ["shipped settings", "edits"],
    "flat_rewards": ["constant reward"],
    "tests": ["marked gpu"],
}


def run(path, *options):
    gpu_card.main(["--dry-run", "--json", str(path), *options])
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_section_runs_on_the_cpu(tmp_path, small_preview):
    lines = run(tmp_path / "card.jsonl", "--seconds", "100000")

    rows = {name: [] for name in ROWS}
    for line in lines:
        rows[line["section"]].append(line["row"])
    assert rows == ROWS
    assert [line for line in lines if "error" in line] == []
    found = {(line["section"], line["row"]): line for line in lines}
    compiled = found["decoder", "compiled, 28 letters"]
    assert compiled["is_used"]
    stock = found["decoder", "eager against the stock pipeline"]
    assert stock["most_levels"] <= 1
    for row in ROWS["token_step"]:
        assert found["token_step", row]["gap_most"] < 1e-4
    for row in ROWS["update"]:
        figures = found["update", row]
        assert figures["mfu"] == pytest.approx(figures["floor_seconds"] / figures["seconds"])
    of_run = found["whole_steps", "two steps of a run"]
    assert of_run["terms"] == ["lpips", "ssim", "ocr", "clip_image"]
    for step in of_run["steps"]:
        assert step["decode_seconds"] < step["wall_seconds"]
        assert 0 < step["idle_share"] < 1
    assert found["large_steps", "edits"]["sources_seconds"] > 0
    assert found["flat_rewards", "constant reward"]["moved_weights"] == 0
    assert found["tests", "marked gpu"]["exit_code"] == 0


def test_rows_that_fail_are_recorded_and_the_next_begin(tmp_path, monkeypatch):
    def failing():
        raise RuntimeError("the card fell off")

    def first(bench):
        yield "one", failing
        yield "two", lambda: {"figure": 2}
        raise ValueError("no model")

    def late(bench):
        while True:
            yield "slow", lambda: time.sleep(0.2) or {}

    sections = {
        "ceilings": (first, 1),
        "decoder": (late, 1),
        "tests": (lambda bench: iter([("three", dict)]), 1),
    }
    monkeypatch.setattr(gpu_card, "SECTIONS", sections)
    monkeypatch.setattr(gpu_card, "speed_of", lambda _: DEVICES["h200"])
    # It takes a second of the three.
    monkeypatch.setattr(Bench, "free", lambda _: None)
    lines = run(tmp_path / "card.jsonl", "--seconds", "3", "--only", *sections)
    rows = [{**line, "took_seconds": None} for line in lines if line["section"] == "ceilings"]
    assert [(row["row"], row.get("error"), row.get("figure")) for row in rows] == [
        ("one", "RuntimeError: the card fell off", None),
        ("two", None, 2),
        ("two", "ValueError: no model", None),
    ]
    # A section that would go on for ever leaves the next one its share.
    assert [line for line in lines if line["section"] == "decoder"][-1]["left_out"]
    assert lines[-1]["row"] == "three"


def test_full_scale_runs_the_configs_of_the_cards():
    bench = Bench(FULL, torch.device("cpu"), DEVICES["h200"], time.monotonic())
    config = bench.config()
    assert config.model.path == PUBLISHED_ID
    assert config.rollout.prompts_per_step * config.rollout.group_size == 64
    assert (config.rollout.height, config.model.adapter.rank) == (512, 32)
    edits = bench.config(name="glm_image_edit_80gb")
    assert edits.data.sources == 1


def test_captions_have_different_lengths():
    lengths = {len(prompt.prompt) for prompt in make_batch(32, prompts=4, group_size=1).prompts}
    assert len(lengths) == 4
