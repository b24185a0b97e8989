"""The keys of an asynchronous run, what cannot be combined, and a run without Ray."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from glm_grpo.collectors.ray_cluster import require_ray
from glm_grpo.config import (
    Config,
    EffectiveConfig,
    compose_config,
    config_differences,
    effective_config,
    flatten,
    from_yaml,
    to_yaml,
)
from glm_grpo.errors import ConfigError


@pytest.fixture
def tiny(configs_dir: Path):
    def compose(*overrides: str) -> Config:
        return compose_config(configs_dir, "tiny", overrides)

    return compose


def test_section_is_named_async_where_users_write_it(tiny) -> None:
    config = tiny("train.mode=async", "async.collectors=3", "async.max_policy_age=2")
    assert config.asynchronous.collectors == 3
    assert "\nasync:\n" in to_yaml(config)
    assert "asynchronous" not in to_yaml(config)
    assert from_yaml(to_yaml(config)) == config
    assert flatten(config.model_dump())["async.max_policy_age"] == 2


@pytest.mark.parametrize(
    ("overrides", "collectors", "push_every", "note"),
    [
        (("collectors=2", "max_policy_age=0"), 1, 1, "async.collectors: 1 is used instead of 2 ("),
        # Two batches may be under way: that of the next step, and the one after it.
        (("collectors=3", "max_policy_age=3"), 2, 1, "async.collectors: 2 is used instead of 3 ("),
        (("push_every=9",), 2, 4, "async.push_every: 4 is used instead of 9 ("),
        (("push_every=4", "collectors=2"), 2, 4, ""),
    ],
)
def test_collectors_and_pushes_that_would_wait_for_ever_are_fewer(
    tiny, overrides: tuple[str, ...], collectors: int, push_every: int, note: str
) -> None:
    given = ("async.max_policy_age=2", *(f"async.{override}" for override in overrides))
    config = tiny("train.mode=async", "train.epochs_per_rollout=2", "async.collectors=2", *given)
    used = effective_config(config)
    section = used.config.asynchronous
    assert (section.collectors, section.push_every) == (collectors, push_every)
    assert used.note.startswith(note)
    assert bool(used.note) == bool(note)
    synchronous = tiny(*given)  # does not read them
    assert effective_config(synchronous) == EffectiveConfig(synchronous, "")


def test_resumed_run_may_have_other_collectors_but_no_other_age(tiny) -> None:
    stored = tiny("train.mode=async")
    where = tiny(
        "train.mode=async",
        "async.collectors=1",
        "async.address=10.0.0.1:6379",
        "async.gpus_per_collector=1",
        "async.cpus_per_collector=4",
    )
    assert config_differences(stored, where) == []
    other = tiny("train.mode=async", "async.max_policy_age=2", "loss.importance_weights=mask")
    assert config_differences(stored, other) == ["async.max_policy_age", "loss.importance_weights"]
    assert config_differences(stored, tiny()) == ["train.mode"]


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        assert name == "ray"
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ConfigError, match=r"pip install 'glm-grpo\[ray\]'"):
        require_ray()
