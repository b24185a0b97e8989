"""Recognise GLM-Image by hub id or files, without importing its classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "GLM-Image"

PUBLISHED_ID = "zai-org/GLM-Image"
"""Hub id of the model whose sizes are known without its files."""

PUBLISHED = (PUBLISHED_ID,)


def is_own(path: str, described: Mapping[str, Any]) -> bool:
    """Whether a `model_index.json` is of a GLM-Image pipeline; see `FamilyFiles`."""
    return described.get("_class_name") == "GlmImagePipeline"
