"""Find a model and its family by `model.path`: the one place that chooses between families."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from huggingface_hub import hf_hub_download

from glm_grpo.config import EMBEDDED_MODELS
from glm_grpo.errors import ConfigError
from glm_grpo.models.family import ModelFamily
from glm_grpo.models.model_files import is_hub_id
from glm_grpo.models.planning import Planner

_FAMILIES = ("glm_image", "janus_pro")
"""Packages beside this file; the first says what is wrong where there is no model."""


@runtime_checkable
class FamilyFiles(Protocol):
    """How a family is recognised; implemented by its light module `files`.

    Attributes:
        NAME: Name for messages.
        PUBLISHED: Hub ids that are known without a network.
    """

    NAME: str
    PUBLISHED: Collection[str]

    def is_own(self, path: str, described: Mapping[str, Any]) -> bool:
        """Whether a model is of this family.

        Args:
            path: A folder or a hub id.
            described: Values of its `model_index.json`, or else `config.json`; empty if it has
                neither, or cannot be read.

        Raises:
            ConfigError: The model is of this family, but in a layout that cannot be loaded.
        """
        ...


@dataclass(frozen=True)
class FoundModel:
    """Files of a model, and the family that reads them.

    Attributes:
        path: A folder, or a hub id.
    """

    family: ModelFamily
    path: str

    def planner(self) -> Planner:
        """Planner for runs of the model."""
        return self.family.build_planner(self.path)

    def known_planner(self) -> Planner | None:
        """Like `planner`, but None for a hub id whose sizes are unknown.

        A folder that is not a model is refused when it is loaded.
        """
        return self.planner() if self.family.knows_sizes(self.path) else None


def find_model(path: str) -> FoundModel:
    """Find a model by `model.path`: an embedded one such as `tiny`, a folder, or a hub id.

    Where nothing can be read, the family's checks say why.

    Raises:
        ConfigError: The model is of no family.
    """
    if path in EMBEDDED_MODELS:
        path = str(files("glm_grpo").joinpath(EMBEDDED_MODELS[path]))
    # Imported when it is needed, because a family imports the classes of its models.
    family = import_module(f"glm_grpo.models.{_find_family(path)}.family")
    return FoundModel(cast("ModelFamily", family), path)


def _find_family(path: str) -> str:
    families = {name: _files_of(name) for name in _FAMILIES}
    is_folder = Path(path).is_dir()
    for name, family in families.items():
        if path in family.PUBLISHED and not is_folder:
            return name
    described = _describe(Path(path).joinpath) if is_folder else _describe_on_hub(path)
    for name, family in families.items():
        if family.is_own(path, described):
            return name
    if described:
        kind = described.get("_class_name", described.get("model_type"))
        examples = [hub_id for family in families.values() for hub_id in family.PUBLISHED]
        raise ConfigError(
            f"model.path is {path!r}: its kind is {kind!r}, and only "
            f"{' and '.join(family.NAME for family in families.values())} can be trained; give the "
            f"top folder, or the hub id, of a model like {' or '.join(examples)}"
        )
    return _FAMILIES[0]


def _files_of(name: str) -> FamilyFiles:
    return cast("FamilyFiles", import_module(f"glm_grpo.models.{name}.files"))


@lru_cache
def _describe_on_hub(path: str) -> dict[str, Any]:
    return _describe(partial(hf_hub_download, path)) if is_hub_id(path) else {}


def _describe(locate: Callable[[str], Path | str]) -> dict[str, Any]:
    for name in ("model_index.json", "config.json"):
        try:
            values = json.loads(Path(locate(name)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(values, dict):
            return values
    return {}
