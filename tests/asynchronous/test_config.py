"""The keys of an asynchronous run, what cannot be combined, and a run without Ray."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from glm_grpo.build_collectors import collector_needs
from glm_grpo.config import (
    Config,
    compose_config,
    config_differences,
    flatten,
    from_yaml,
    to_yaml,
)
from glm_grpo.errors import ConfigError
from glm_grpo.training.ray_cluster import Needs, require_ray


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


def test_a_run_from_before_there_was_the_section_is_a_synchronous_one(tiny) -> None:
    config = tiny("run_dir=here")
    lines = to_yaml(config).split("\n")
    start = lines.index("async:")
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" "))
    text = "\n".join(line for line in lines[:start] + lines[end:] if line != "  mode: sync")
    assert from_yaml(text) == config


def test_unknown_key_of_the_section_names_the_nearest(tiny) -> None:
    with pytest.raises(ConfigError, match=r"did you mean async\.collectors\?"):
        tiny("+async.colectors=3")


@pytest.mark.parametrize(
    ("override", "pattern"),
    [
        ("async.collectors=0", r"async\.collectors = 0\n.*must be at least 1"),
        ("async.max_policy_age=-1", r"async\.max_policy_age = -1\n.*must be at least 0"),
        ("async.push_every=0", r"async\.push_every = 0\n.*must be at least 1"),
        ("async.max_importance_ratio=0.5", r"max_importance_ratio = 0.5\n.*must be at least 1"),
        ("async.on_stale=ignore", r"async\.on_stale = 'ignore'\n.*one of weigh, drop"),
        ("async.gpus_per_collector=-1", r"must be at least 0"),
        ("async.gpus_per_collector=1.5", r"gpus_per_collector = 1.5\n.*or a whole number"),
        ("async.gpus_per_collector=0.00001", r"0, 0.0001 to 1, or a whole number"),
        ("async.cpus_per_collector=0", r"must be at least 1"),
        ("train.mode=asynch", r"did you mean async\?"),
    ],
)
def test_values_out_of_range_are_refused(tiny, override: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        tiny(override)


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        (
            ("async.collectors=2", "async.max_policy_age=0"),
            r"async\.collectors = 2\n.*must not exceed 1 where async\.max_policy_age = 0(.|\n)*"
            r"set async\.collectors=1, or async\.max_policy_age=1",
        ),
        (
            ("async.collectors=3", "async.max_policy_age=3", "train.updates_per_rollout=2"),
            r"must not exceed 2 where async\.max_policy_age = 3 and train\.updates_per_rollout = 2"
            r"(.|\n)*async\.max_policy_age=4",
        ),
        (
            ("async.push_every=3",),
            r"async\.push_every = 3\n.*must not exceed 2(.|\n)*set async\.push_every=2 or less",
        ),
    ],
)
def test_what_would_wait_for_ever_is_refused_in_an_asynchronous_run(
    tiny, overrides: tuple[str, ...], pattern: str
) -> None:
    with pytest.raises(ConfigError, match=pattern):
        tiny("train.mode=async", *overrides)
    tiny(*overrides)  # a synchronous run does not read them


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
    other = tiny("train.mode=async", "async.max_policy_age=2", "async.on_stale=drop")
    assert config_differences(stored, other) == ["async.max_policy_age", "async.on_stale"]
    assert config_differences(stored, tiny()) == ["train.mode"]


def test_needs_of_the_collectors_are_those_of_the_config(tiny) -> None:
    config = tiny("async.cpus_per_collector=4", "async.gpus_per_collector=0.5")
    assert collector_needs(config) == Needs(collectors=2, cpus=4, gpus=0.5)


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        assert name == "ray"
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ConfigError, match=r"pip install 'glm-grpo\[ray\]'"):
        require_ray()
