"""Old names of keys and metrics: stored runs are read, and new configs are told the new names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_grpo.config import Config, compose_config, flatten, from_yaml, to_yaml
from glm_grpo.config.renamed import RENAMED, new_key
from glm_grpo.errors import ConfigError
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from rewards.problems import known_keys
from tests.factories import CONFIG_DIR, tiny_config

OLD = {
    "advantage": {"later": 0.25},
    "anchor": {"weight": 0.5, "final_weight": None, "preview": "encode"},
    "async": {"on_stale": "drop", "max_importance_ratio": 3.0, "min_importance_ratio": 0.5},
    "loss": {"ratio_cap": 4.0, "reference_mix": 0.5, "reference_sync_every": 3},
    "reward": {"allow_untied": True, "terms": {"ocr": {"only": "a*"}}},
    "rollout": {"refill_rounds": 2},
    "train": {"updates_per_rollout": 3, "minibatches_per_rollout": 2, "skip_flat": True},
}
NEW = {
    **{"advantage.reward_to_go": 0.25, "sft.weight": 0.5, "sft.preview": "encode"},
    **{"loss.importance_weights": "mask", "loss.max_importance_ratio": 3.0},
    **{"loss.min_importance_ratio": 0.5, "loss.two_sided_clip": 4.0},
    **{"loss.reference_mixup_alpha": 0.5, "loss.reference_sync_steps": 3},
    **{"reward.allow_image_only": True, "reward.terms.ocr.prompt_ids": "a*"},
    **{"rollout.dynamic_sampling_rounds": 2, "train.epochs_per_rollout": 3},
    **{"train.minibatches": 2, "train.skip_zero_std": True},
}


def stored(config: Config, old: dict[str, Any]) -> str:
    """The config of a run with old keys in place of those that they are now."""
    values: dict[str, Any] = yaml.safe_load(to_yaml(config))

    def replace(section: dict[str, Any], changes: dict[str, Any], prefix: str) -> None:
        for name, value in changes.items():
            if isinstance(value, dict):
                replace(section.setdefault(name, {}), value, f"{prefix}{name}.")
                continue
            section[name] = value
            parts = str(new_key(f"{prefix}{name}")).split(".")
            place = values
            for part in parts[:-1]:
                place = place[part]
            del place[parts[-1]]

    replace(values, old, "")
    del values["sft"]
    return yaml.safe_dump(values)


def test_every_key_has_its_new_name_in_the_config() -> None:
    assert {*RENAMED.values()} <= {*known_keys(Config)}
    assert not {*RENAMED} & {*known_keys(Config)}


def test_a_stored_run_is_read_by_its_old_keys(tmp_path: Path) -> None:
    text = stored(tiny_config(), OLD)
    found = flatten(from_yaml(text).model_dump())
    assert {key: found[key.replace("async.", "asynchronous.")] for key in NEW} == NEW
    # As `train.resume=RUN` does, which composes the stored config.
    (tmp_path / "config.yaml").write_text(text)
    assert compose_config(tmp_path, "config", []) == from_yaml(text)


def test_the_cap_of_cispo_is_its_largest_ratio() -> None:
    config = tiny_config("loss=cispo")
    text = to_yaml(config).replace("max_ratio: 5.0", "ratio_cap: 3.0")
    assert flatten(from_yaml(text).model_dump())["loss.max_ratio"] == 3.0


def test_a_new_config_is_told_the_new_names(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"defaults": ["tiny", "_self_"], **OLD}))
    with pytest.raises(ConfigError) as caught:
        compose_config(tmp_path, "mine", [])
    for old, new in RENAMED.items():
        assert f"  {old} is now {new}\n" in f"{caught.value}\n"
    assert "reward.terms.ocr.only is now reward.terms.ocr.prompt_ids" in str(caught.value)


@pytest.mark.parametrize("key", ["advantage.later", "train.skip_flat", "anchor.weight"])
def test_an_override_is_told_the_new_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is now {RENAMED[key]}"):
        compose_config(CONFIG_DIR, "tiny", [f"{key}=1"])
    with pytest.raises(ConfigError, match="loss.ratio_cap is now loss.max_ratio"):
        compose_config(CONFIG_DIR, "tiny", ["loss=cispo", "loss.ratio_cap=3"])


def test_metrics_of_older_runs_have_their_new_names(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    own = {"reward/brand_anchor/mean": 0.5, "mine/flat_fraction": 1.0}
    old = {"step": 1, "advantage/flat_fraction": 0.5, "anchor/weight": 0.1, **own}
    folder.metrics_path.write_text(json.dumps(old) + "\n")
    assert read_metrics(folder) == [
        {"step": 1, "advantage/zero_std_fraction": 0.5, "sft/weight": 0.1, **own}
    ]
