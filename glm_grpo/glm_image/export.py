"""Writes trained weights in the forms other programs load."""

from __future__ import annotations

from pathlib import Path

from diffusers import GlmImagePipeline

from glm_grpo.errors import ConfigError
from glm_grpo.glm_image.policy import Policy


def export_adapter(policy: Policy, directory: Path) -> None:
    """A folder that `PeftModel.from_pretrained(language model, directory)` loads.

    Raises:
        ConfigError: The policy was trained in full, so there is no adapter.
    """
    if policy.adapted_model is None:
        raise ConfigError(
            "the run trained the language model in full (model.adapter is absent), so there is no "
            "adapter to export; use --format pipeline"
        )
    policy.adapted_model.save_pretrained(directory)


def export_pipeline(policy: Policy, pipeline: GlmImagePipeline, directory: Path) -> None:
    """A folder that stock `GlmImagePipeline.from_pretrained` loads, adapters merged in.

    The policy cannot be trained on after this.

    Args:
        policy: Built on the parts of `pipeline`.
        pipeline: Gives all other parts.
        directory: New or empty.
    """
    model = policy.model
    if policy.adapted_model is not None:
        model = policy.adapted_model.merge_and_unload()
    pipeline.register_modules(vision_language_encoder=model)
    pipeline.save_pretrained(directory)
