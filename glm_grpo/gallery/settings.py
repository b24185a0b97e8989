"""What the gallery says of a run's settings: from its config or, failing that, from its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from glm_grpo.config import Config
from glm_grpo.errors import CheckpointError, ConfigError, StorageError
from glm_grpo.gallery.problems import Problem, describe
from glm_grpo.run.config import read_config, read_config_text
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import Weighing, read_weighing
from rewards.terms_config import OcrConfig

_OCR = "ocr"


@dataclass(frozen=True)
class Settings:
    """What the pages need to know besides what was recorded.

    Attributes:
        values: `reward`, `advantage`, `group_size`, `picture`, `steps_planned`, `canary_margin`
            and `config`, as in `run.js`.
        readers: OCR terms by name, and whether case counts.
        problems: Why something is missing.
    """

    values: Mapping[str, Any]
    readers: Mapping[str, bool]
    problems: tuple[Problem, ...]


def read_settings(folder: RunFolder) -> Settings:
    """The settings of a run; where its config cannot be read, what its tables tell."""
    text = None
    try:
        text = read_config_text(folder)
        config = read_config(folder)
    except (CheckpointError, ConfigError, StorageError) as error:
        problem = {"where": folder.config_path.name, "message": describe(error, folder)}
        return _from_tables(folder, text, problem)
    return Settings(_from_config(config, text), _readers(config), ())


def _from_config(config: Config, text: str) -> dict[str, Any]:
    reward, rollout = config.reward, config.rollout
    kinds = {name: term["kind"] for name, term in reward.model_dump()["terms"].items()}
    return {
        "reward": {
            "combine": reward.combine,
            "terms": [
                _term(name, kinds[name], term.weight, term.std_floor)
                for name, term in reward.terms.items()
            ],
            "watch": list(reward.watch),
        },
        "advantage": config.advantage.model_dump(),
        "group_size": rollout.group_size,
        "picture": {"width": rollout.width, "height": rollout.height},
        "steps_planned": config.train.steps,
        "canary_margin": reward.canary_margin,
        "config": text,
    }


def _readers(config: Config) -> dict[str, bool]:
    return {
        name: term.case_sensitive
        for name, term in config.reward.terms.items()
        if isinstance(term, OcrConfig)
    }


def _from_tables(folder: RunFolder, text: str | None, problem: Problem) -> Settings:
    weighing = _first_weighing(folder)
    # A term that is used once bears the name of its kind.
    terms = [
        _term(name, name, _decimal(weight), _decimal(weighing.std_floors[name]))
        for name, weight in weighing.weights.items()
    ]
    values = {
        "reward": {"combine": weighing.combine, "terms": terms, "watch": []},
        "advantage": None,
        "group_size": None,
        "picture": None,
        "steps_planned": None,
        "canary_margin": None,
        "config": text,
    }
    readers = {_OCR: False} if _OCR in weighing.weights else {}
    return Settings(values, readers, (problem,))


def _first_weighing(folder: RunFolder) -> Weighing:
    """How the first table that can be read was weighed; no terms without one."""
    for directory in (folder.rollouts_dir, folder.evaluations_dir):
        for path in sorted(directory.glob("step-*.parquet")):
            try:
                return read_weighing(path)
            except StorageError:
                continue
    return Weighing({}, {}, "weighted_sum")


def _term(name: str, kind: str, weight: float, std_floor: float) -> dict[str, Any]:
    return {"name": name, "kind": kind, "weight": weight, "std_floor": std_floor}


def _decimal(value: float) -> float:
    """The shortest decimal that gives a 32-bit number back, as it stood in the config."""
    return float(str(np.float32(value)))
