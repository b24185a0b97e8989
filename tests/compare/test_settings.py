from __future__ import annotations

from pathlib import Path

from glm_grpo.compare.comparison import differing_settings, list_settings
from glm_grpo.config import compose_config


def test_list_settings_gives_values_as_json_by_dotted_key(configs_dir: Path) -> None:
    settings = list_settings(compose_config(configs_dir, "tiny", ["data.path='שלום \"a\".txt'"]))
    assert settings["data.path"] == '"שלום \\"a\\".txt"'
    assert settings["reward.terms.ocr.weight"] == "0.3"
    assert "reward.terms.ocr" not in settings


def test_differing_settings_leave_out_where_a_run_lies(configs_dir: Path) -> None:
    overrides = ["run_dir=/elsewhere", "train.resume=/elsewhere", "train.seed=7"]
    configs = [compose_config(configs_dir, "tiny", words) for words in ([], overrides)]
    assert [list(settings) for settings in differing_settings(configs)] == [["train.seed"]] * 2


def test_differing_settings_compare_all_configs_with_all(configs_dir: Path) -> None:
    # The second equals the first; the third alone is another.
    seeds = [7, 7, 8]
    configs = [compose_config(configs_dir, "tiny", [f"train.seed={seed}"]) for seed in seeds]
    assert differing_settings(configs) == [{"train.seed": str(seed)} for seed in seeds]
