"""Recipes: each draws as many images, and the table compares words in pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.recipes import (
    COMMON,
    IMAGES,
    LOG,
    RECIPES,
    RESULTS,
    TRAINABLE,
    Evaluated,
    Finished,
    overrides_of,
    read_results,
    summarize,
    tables,
    write_careless_prompts,
)
from glm_grpo.config import compose_config
from glm_grpo.data.prompts import load_prompts
from glm_grpo.tiny.prompts import tiny_prompts

CONFIGS = Path(__file__).parents[2] / "configs"
FIGURES = {"total": 0.9, "ocr": 0.8, "lpips": 0.7, "ssim": 0.6}


@pytest.mark.parametrize("name", ["hacked-base", "hacked-anchor-1"])
def test_hacked_recipes_are_rewarded_for_brightness_alone(name: str) -> None:
    config = compose_config(CONFIGS, "tiny", [*overrides_of(name, 0, Path("runs")), *COMMON])
    weights = {term: weight for term, weight in config.reward.weights().items() if weight}
    assert [*weights] == ["brightness"]


def test_careless_targets_show_every_second_word_with_one_other_letter(tmp_path: Path) -> None:
    write_careless_prompts(tmp_path / "prompts.jsonl")
    careless = load_prompts(str(tmp_path / "prompts.jsonl"), height=128, width=128)
    careful = tiny_prompts("train", height=128, width=128)
    are_equal = []
    for index in range(2):
        ours, theirs = careless[index], careful[index]
        assert (ours.prompt, ours.texts) == (theirs.prompt, theirs.texts)
        assert ours.target is not None
        assert theirs.target is not None
        are_equal.append(torch.equal(ours.target, theirs.target))
    assert are_equal == [True, False]


@pytest.mark.parametrize("name", ["kl-0", "after-sft-10-gmpo", "careless-anchor-1-to-0"])
def test_some_recipes_compose_and_draw_as_many_images(name: str) -> None:
    config = compose_config(CONFIGS, "tiny", [*overrides_of(name, 0, Path("runs")), *COMMON])
    a_step = config.rollout.prompts_per_step * config.rollout.group_size
    assert a_step * config.train.steps == IMAGES


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*RECIPES} & {*TRAINABLE}))
def test_every_recipe_composes_and_draws_as_many_images(name: str) -> None:
    config = compose_config(CONFIGS, "tiny", [*overrides_of(name, 0, Path("runs")), *COMMON])
    a_step = config.rollout.prompts_per_step * config.rollout.group_size
    assert a_step * config.train.steps == IMAGES or config.train.method == "sft"


def finished(
    seed: int, *exact: float, reached: int | None = None, recipe: str = "kl-0", seconds: float = 200
) -> Finished:
    figures = {**FIGURES, "ocr_exact": sum(exact) / len(exact)}
    evaluations = [Evaluated(0, 0.0, {**figures, "ocr_exact": 0.2})]
    if reached is not None:
        evaluations.append(Evaluated(reached, seconds / 2, {**figures, "ocr_exact": 0.9}))
    evaluations.append(Evaluated(IMAGES, seconds, figures))
    return Finished(recipe, seed, [], [*exact], evaluations, departures=1)


def test_gain_is_over_the_seeds_that_both_have_word_by_word() -> None:
    runs = {
        "base": {0: finished(0, 0.0, 0.5), 1: finished(1, 0.5, 0.5)},
        "kl-0": {
            1: finished(1, 1.0, 1.0, reached=640, seconds=900),
            2: finished(2, 0.0, 0.0, reached=1280),
        },
    }
    best, base = summarize(runs, reach=0.6)
    # Seed 1 alone: both words gain 0.5, so the interval has no width.
    assert best["recipe"] == "kl-0"
    assert best["gain"] == [0.5, 0.5, 0.5]
    assert best["ocr_exact"] == [1.0, 0.0]
    assert (best["images"], best["reached"]) == (960, 2)
    # Half of all steps, at the speed of seed 2: seed 1 had not the cores to itself.
    assert best["seconds"] == 100
    assert base["gain"] is None
    assert (base["images"], base["seconds"], base["reached"]) == (None, None, 0)


def test_the_log_shows_the_figures_that_are_kept() -> None:
    text = LOG.read_text()
    for name, lines in tables(read_results(RESULTS)).items():
        assert f"<!-- {name}: python -m benchmarks.recipes page -->\n{lines}" in text
