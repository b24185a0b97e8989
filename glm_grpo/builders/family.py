"""The one place that chooses a family of models."""

from __future__ import annotations

from glm_grpo.models.family import ModelFamily
from glm_grpo.models.glm_image import family as glm_image


def family_of(path: str) -> ModelFamily:
    """Choose the family of a model; there is one so far."""
    return glm_image
