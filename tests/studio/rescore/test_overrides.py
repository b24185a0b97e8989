from __future__ import annotations

from pathlib import Path

import pytest

from glm_grpo.config import Config, compose_config
from glm_grpo.errors import ConfigError
from glm_grpo.studio.rescore.rescore import SettingChange, list_changes, override_weighing


@pytest.fixture(scope="module")
def config(configs_dir: Path) -> Config:
    return compose_config(configs_dir, "tiny", [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.terms.ocr.weight", "'reward.terms.ocr.weight'\n"),
        ("reward.terms.ocr.weight=0.1,0.2", "weight=0.1,0.2'.*single value"),
        (
            "reward.terms.clip_score.weight=0.5",
            "'clip_score'.*lpips, ssim, ocr, aesthetic"
            r".*\+reward.terms.clip_score.weight=0",
        ),
        ("reward.terms.ocrr.weight=1", r"'ocrr'.*mean reward.terms.ocr\?$"),
        ("advantages.clip=1", r"remedy: did you mean advantage.clip\?$"),
        ("orc=0.9", r"'orc'.*mean reward.terms.ocr\?$"),
        ("zebra=1", "'zebra'.*lpips, ssim, ocr, aesthetic"),
        ("train.steps=3", "train.steps = 3.*glm-grpo train train"),
        ("reward.terms.ocr.threads=3", "reward.terms.ocr.threads = 3"),
        ("reward.terms.ocr.weight=much", "reward.terms.ocr.weight = 'much'"),
    ],
)
def test_override_weighing_refuses_what_cannot_be_tried(
    override: str, message: str, config: Config
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        override_weighing(config, [override])


def test_a_terms_name_stands_for_its_weight(configs_dir: Path) -> None:
    mine = "+reward.terms.mine={kind: custom, weight: 0.5, function: 'a:b'}"
    config = compose_config(configs_dir, "tiny", [mine])
    other = override_weighing(config, ["ocr=0.9", "mine=null"])
    assert other.reward.weights() == {**config.reward.weights(), "ocr": 0.9, "mine": 0.0}
    assert list_changes(config, other, ["ocr=0.9", "mine=null"]) == (
        SettingChange("reward.terms.ocr.weight", 0.3, 0.9),
        SettingChange("reward.terms.mine.weight", 0.5, 0.0),
    )


def test_override_weighing_refuses_a_reward_of_nothing(config: Config) -> None:
    zeros = [f"reward.terms.{name}.weight=0" for name in config.reward.terms]
    with pytest.raises(ConfigError, match="reward is 0"):
        override_weighing(config, zeros)


def test_list_changes_names_keys_once_and_only_those_that_change(config: Config) -> None:
    overrides = [
        *("reward.terms.ocr.weight=0.3", "advantage.clip=null"),
        *("reward.terms.lpips.weight=0.5", "reward.terms.lpips.weight=0.25"),
    ]
    # ocr has 0.3 already; of a key given twice the last value counts.
    assert list_changes(config, override_weighing(config, overrides), overrides) == (
        SettingChange("advantage.clip", 5.0, None),
        SettingChange("reward.terms.lpips.weight", 0.4, 0.25),
    )
