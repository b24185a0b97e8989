from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.config import (
    compose_config,
    config_differences,
    from_yaml,
    to_yaml,
    validate_config,
)
from glm_grpo.errors import ConfigError

Bend = Callable[[str, object], dict[str, Any]]


def test_yaml_restores_the_config(configs_dir: Path) -> None:
    config = compose_config(configs_dir, "tiny", ["optim.epsilon=1e-15"])
    restored = from_yaml(to_yaml(config))
    assert restored == config
    assert restored.optim.epsilon == 1e-15


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2\n", "mapping of sections"),
        ("model: {path: tiny\n", "cannot be read"),
        ("train: {seed: 010}\n", "line 1: train.seed = 010"),
    ],
)
def test_from_yaml_refuses_what_is_no_config(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(text)


def test_a_stored_config_does_not_read_the_environment(
    configs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run folder may be someone else's, and what is read from it goes into pages.
    monkeypatch.setenv("JUDGE_KEY", "secret")
    stored = to_yaml(compose_config(configs_dir, "tiny", ["run_dir=mine"]))
    read = from_yaml(stored.replace("run_dir: mine", "run_dir: ${oc.env:JUDGE_KEY}"))
    assert read.run_dir == "${oc.env:JUDGE_KEY}"


# Which keys may differ is in test_every_key.py.
def test_config_differences_lets_a_constant_schedule_run_longer(bend: Bend) -> None:
    stored = validate_config(bend("optim.schedule", "constant"))
    assert config_differences(stored, validate_config(bend("train.steps", 500))) == []
    # A weight that ends at the last step has another one at every step before.
    longer = validate_config(bend("sft.final_weight", 0.1))
    ends = validate_config(bend("train.steps", 40))
    assert config_differences(ends, longer) == ["train.steps"]


def test_config_differences_sees_the_estimator_of_a_kl_that_is_weighed(bend: Bend) -> None:
    stored = validate_config(bend("loss.kl_estimator", "k3"))
    given = validate_config(bend("loss.kl_estimator", "k3_corrected"))
    assert config_differences(stored, given) == ["loss.kl_estimator"]
    bend("loss.kl_coef", 0.0)
    given = validate_config(bend("loss.kl_estimator", "k2"))
    stored = validate_config(bend("loss.kl_estimator", "k3"))
    assert config_differences(stored, given) == []
