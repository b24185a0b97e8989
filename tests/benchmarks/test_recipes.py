"""Recipes: each draws as many images, and the table compares words in pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.recipes import (
    COMMON,
    IMAGES,
    RECIPES,
    Finished,
    overrides_of,
    read_runs,
    summarize,
)
from glm_grpo.config import compose_config

CONFIGS = Path(__file__).parents[2] / "configs"
FIGURES = {"total": 0.9, "ocr": 0.8, "lpips": 0.7, "ssim": 0.6}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_composes_and_draws_as_many_images(name: str) -> None:
    config = compose_config(CONFIGS, "tiny", [*overrides_of(name, 0, Path("runs")), *COMMON])
    a_step = config.rollout.prompts_per_step * config.rollout.group_size
    assert a_step * config.train.steps == IMAGES or config.train.method == "sft"


def finished(*exact: float, reached: tuple[int, float] | None = None) -> Finished:
    last: dict[str, float | None] = {f"eval/{name}": value for name, value in FIGURES.items()}
    last["eval/ocr_exact"] = sum(exact) / len(exact)
    return Finished(torch.tensor(exact), last, {}, reached, departures=1)


def test_gain_is_over_the_seeds_that_both_have_word_by_word() -> None:
    runs = {
        "base": {0: finished(0.0, 0.5), 1: finished(0.5, 0.5)},
        "kl-0": {
            1: finished(1.0, 1.0, reached=(640, 60.0)),
            2: finished(0.0, 0.0, reached=(1280, 100.0)),
        },
    }
    best, base = summarize(runs)
    # Seed 1 alone: both words gain 0.5, so the interval has no width.
    assert best["recipe"] == "kl-0"
    assert best["gain"] == [0.5, 0.5, 0.5]
    assert best["ocr_exact"] == [1.0, 0.0]
    assert (best["images"], best["seconds"], best["reached"]) == (960, 80.0, 2)
    assert base["gain"] is None
    assert (base["images"], base["reached"]) == (None, 0)


def test_runs_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    assert read_runs(tmp_path, ["base"], [0], reach=0.5) == {}
