"""Keys of other trainers are answered with ours, and the table of them names real keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from glm_grpo.config import Config, compose_config
from glm_grpo.config.other_trainers import COUNTERPARTS, counterpart_of
from glm_grpo.errors import ConfigError
from rewards.problems import known_keys
from tests.factories import CONFIG_DIR

NOT_OF_GRPO_CONFIG = {
    *("reward_funcs", "r", "lora_alpha", "target_modules", "lora_dropout", "dropout"),
    *("model_name_or_path", "lora_r", "lora_target_modules"),
}
"""Arguments of GRPOTrainer and LoraConfig, and options of TRL's scripts."""


def test_every_counterpart_is_a_key() -> None:
    ours = {each.ours for each in COUNTERPARTS} - {None, "reward.terms.<name>.weight"}
    # The kinds of a union are known by their options.
    assert ours <= {*known_keys(Config)}


def test_a_name_leads_to_one_key() -> None:
    found: dict[str, str | None] = {}
    for each in COUNTERPARTS:
        for name in each.names():
            assert found.setdefault(name, each.ours) == each.ours


def test_the_names_of_trl_are_those_of_its_config() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'glm-grpo[trl]'")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    named = {name for each in COUNTERPARTS for name in each.trl.split()}
    assert named - fields == NOT_OF_GRPO_CONFIG


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("beta", "TRL's beta is loss.kl_coef here"),
        ("actor_rollout_ref.actor.ppo_epochs", "verl's actor.ppo_epochs is train.epochs_per_"),
        ("rollout.n", "verl's rollout.n is rollout.group_size here"),
        # The whole name before its last part, which is a name of ours.
        ("train.batch_size", "flow_grpo's train.batch_size is train.micro_batch_size here"),
        # The last part of `sample.num_steps`, in a section of ours.
        ("decode.num_steps", "flow_grpo's num_steps is decode.rollout_steps here"),
        ("loss.epsilon", "TRL's epsilon is loss.clip_low here"),
        ("model.adapter.dropout", "TRL's dropout has nothing to be set here; a token must be"),
        ("max_completion_length", "TRL's max_completion_length has nothing to be set here; the"),
        ("device", "choose the GPU with the environment variable CUDA_VISIBLE_DEVICES, such as "),
        ("train.gpu", "choose the GPU with the environment variable CUDA_VISIBLE_DEVICES, such "),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_ours(key: str, answer: str) -> None:
    assert (counterpart_of(key) or "").startswith(answer)


@pytest.mark.parametrize(
    "key",
    [
        *("optim.epsilon", "optim.beta", "n", "data.shuffle", "reward.terms.mine.beta"),
        "model.adapter.enable",
    ],
)
def test_other_keys_have_no_counterpart(key: str) -> None:
    assert counterpart_of(key) is None


@pytest.mark.parametrize("word", ["device=cuda:3", "+model.device=cuda:3", "cuda=3"])
def test_an_override_that_chooses_a_gpu_is_told_the_variable(word: str) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=3 glm-grpo train") as caught:
        compose_config(CONFIG_DIR, "tiny", [word])
    assert "use +" not in str(caught.value)


@pytest.mark.parametrize("word", ["loss.beta=0.04", "beta=0.04", "train={beta: 0.04}"])
def test_an_override_by_a_foreign_name_is_told_ours(word: str) -> None:
    with pytest.raises(ConfigError, match=r"beta: \w+'s [\w.]*beta is loss\.kl_coef here"):
        compose_config(CONFIG_DIR, "tiny", [word])


def test_a_file_with_foreign_names_is_told_ours(tmp_path: Path) -> None:
    values = {"loss": {"beta": 0.04}, "rollout": {"num_generations": 8}, "save_steps": 5}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"defaults": ["tiny", "_self_"], **values}))
    with pytest.raises(ConfigError, match="has 3 problems") as caught:
        compose_config(tmp_path, "mine", [])
    for answer in ("loss.kl_coef", "rollout.group_size", "train.checkpoint_every"):
        assert f" is {answer} here" in str(caught.value)


def test_the_keys_of_a_foreign_section_in_a_file_are_told_ours(tmp_path: Path) -> None:
    values = {
        "algorithm": {"kl_ctrl": {"kl_coef": 0.1}, "adv_estimator": "grpo"},
        "sample": {"num_image_per_prompt": 4},
        "mine": {"other": 1},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"defaults": ["tiny", "_self_"], **values}))
    with pytest.raises(ConfigError, match="has 3 problems") as caught:
        compose_config(tmp_path, "mine", [])
    for told in (
        "algorithm.kl_ctrl.kl_coef = 0.1",
        "verl's algorithm.kl_ctrl.kl_coef is loss.kl_coef here",
        "flow_grpo's sample.num_image_per_prompt is rollout.group_size here",
        "mine = {'other': 1}",
    ):
        assert told in str(caught.value)
