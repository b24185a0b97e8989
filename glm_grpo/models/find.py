"""Find a model and its family by `model.path`: the one place that chooses between families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from huggingface_hub import hf_hub_download

from glm_grpo.config import TINY
from glm_grpo.errors import ConfigError
from glm_grpo.models.family import ModelFamily
from glm_grpo.models.planning import Planner

_GLM_IMAGE, _JANUS_PRO = "glm_image", "janus_pro"

_PUBLISHED = {
    "zai-org/GLM-Image": _GLM_IMAGE,
    "deepseek-community/Janus-Pro-1B": _JANUS_PRO,
    "deepseek-community/Janus-Pro-7B": _JANUS_PRO,
}
"""Families of hub ids that are known without a network."""


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
    """Find a model by `model.path`: `tiny`, a folder, or a hub id.

    What belongs to no family is left to GLM-Image, which says what it lacks.
    """
    if path == TINY:
        embedded = files("glm_grpo.tiny") / "weights" / "pipeline"
        return FoundModel(_family(_GLM_IMAGE), str(embedded))
    name = _family_in(path) if Path(path).is_dir() else _PUBLISHED.get(path) or _family_on_hub(path)
    return FoundModel(_family(name), path)


def _family(name: str) -> ModelFamily:
    # Imported when it is needed, because a family imports the classes of its models.
    return cast("ModelFamily", import_module(f"glm_grpo.models.{name}.family"))


def _family_in(path: str) -> str:
    if (Path(path) / "model_index.json").is_file():
        return _GLM_IMAGE
    return _family_by(_read_config(Path(path) / "config.json"), path)


@lru_cache
def _family_on_hub(path: str) -> str:
    """Family by the config of a hub id, from the cache or the hub."""
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        return _GLM_IMAGE
    if path.startswith("deepseek-ai/Janus"):
        # All of them, which needs no network to say.
        return _family_by({"model_type": "multi_modality"}, path)
    try:
        found = hf_hub_download(path, "config.json")
    except (OSError, ValueError):
        # A pipeline has no config at its top; a hub that cannot be reached is named later.
        return _GLM_IMAGE
    return _family_by(_read_config(Path(found)), path)


def _family_by(config: dict[str, Any], path: str) -> str:
    kind = config.get("model_type")
    if kind == "multi_modality":
        raise ConfigError(
            f"model.path is {path!r}: Janus in its original layout (model_type multi_modality), "
            "which transformers does not load; use the converted one, such as "
            "deepseek-community/Janus-Pro-1B or deepseek-community/Janus-Pro-7B"
        )
    return _JANUS_PRO if kind == "janus" else _GLM_IMAGE


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
