"""Recognise Janus-Pro by hub id or files, without importing its classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm_grpo.errors import ConfigError

NAME = "Janus-Pro"

PUBLISHED = {
    "deepseek-community/Janus-Pro-1B": (2048, 5632, 24, 16),
    "deepseek-community/Janus-Pro-7B": (4096, 11008, 30, 32),
}
"""Width, MLP width, layers and heads of models whose sizes are known without their files."""

_ORIGINALS = "deepseek-ai/Janus"
"""Start of the hub ids of models in the original layout."""


def is_own(path: str, described: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a Janus that transformers loads; see `FamilyFiles`.

    Raises:
        ConfigError: It is a Janus in its original layout.
    """
    kind = described.get("model_type")
    if kind == "multi_modality" or (not described and path.startswith(_ORIGINALS)):
        raise ConfigError(
            f"model.path is {path!r}: Janus in its original layout (model_type multi_modality), "
            "which transformers does not load; use the converted one, such as "
            f"{' or '.join(PUBLISHED)}"
        )
    return kind == "janus"
