"""A complete config as plain values, written out so that tests can bend one key at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

Bend = Callable[[str, object], dict[str, Any]]


@pytest.fixture(scope="session")
def composed(configs_dir: Path) -> dict[str, Any]:
    """What Hydra composes from `configs/tiny.yaml`, resolved and not validated."""
    with initialize_config_dir(str(configs_dir), version_base=None):
        container = OmegaConf.to_container(compose("tiny"), resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


@pytest.fixture
def values(composed: dict[str, Any]) -> dict[str, Any]:
    """A copy that a test may change."""
    return copy.deepcopy(composed)


def set_keys(values: dict[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    """Sets dotted keys, known or not, in sections that are there, and returns the values."""
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = copy.deepcopy(value)
    return values


@pytest.fixture
def bend(values: dict[str, Any]) -> Bend:
    """Sets one dotted key of the values and returns them."""
    return lambda key, value: set_keys(values, {key: value})
