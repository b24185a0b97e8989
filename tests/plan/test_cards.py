"""The configs for the published model fit the cards they are named for."""

from pathlib import Path

import pytest

from glm_grpo.config import compose_config
from glm_grpo.models.find import find_model
from glm_grpo.models.glm_image.files import PUBLISHED_ID
from glm_grpo.models.planning import Parallelism
from glm_grpo.plan.fit import ConfigPlanner

CONFIGS = Path(__file__).parents[2] / "configs"
ROOM = 0.92
"""Twice as far from the card's size as plans were from what was measured."""
PROMPTS = ("data.path=prompts.txt", "data.eval_path=held_out.txt")


@pytest.fixture(scope="module")
def planner():
    return ConfigPlanner(
        find_model(PUBLISHED_ID).planner(), prompt_tokens=256, is_on_accelerator=True
    )


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("", 16), ("", 24), ("", 80), ("edit_", 24), ("edit_", 80)]
)
def test_config_of_a_card_leaves_room_on_it(planner, name, gigabytes):
    config = compose_config(CONFIGS, f"glm_image_{name}{gigabytes}gb", PROMPTS)
    assert planner.plan(config).peak <= ROOM * gigabytes * 10**9


@pytest.mark.parametrize("count", [4, 8])
def test_full_fine_tuning_leaves_room_on_4_or_8_cards(count):
    processes = Parallelism(count, is_sharded=True, is_mixed=True)
    planner = ConfigPlanner(
        find_model(PUBLISHED_ID).planner(),
        prompt_tokens=256,
        is_on_accelerator=True,
        parallelism=processes,
    )
    config = compose_config(CONFIGS, "glm_image_full", PROMPTS)
    assert config.rollout.prompts_per_step % count == 0
    assert planner.plan(config).peak <= ROOM * 80 * 10**9


def test_every_config_of_a_card_is_planned():
    names = {path.stem for path in CONFIGS.glob("glm_image*.yaml")}
    cards = {"glm_image_16gb", "glm_image_24gb", "glm_image_80gb"}
    edits = {"glm_image_edit_24gb", "glm_image_edit_80gb"}
    assert names == cards | edits | {"glm_image_full"}
