"""GLM-Image as a `ModelFamily`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from diffusers import GlmImagePipeline

from glm_grpo.config import Config
from glm_grpo.errors import ConfigError
from glm_grpo.models.base import TextRule
from glm_grpo.models.export_page import StockSettings
from glm_grpo.models.family import adapter_problems, refuse, unused_key_problems
from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.export import export_adapter, export_pipeline
from glm_grpo.models.glm_image.files import NAME, PUBLISHED_ID
from glm_grpo.models.glm_image.loading import (
    check_index,
    check_model,
    check_source_size,
    check_target_size,
    load_pipeline,
)
from glm_grpo.models.glm_image.planner import GlmImagePlanner, read_part_configs, trained_side
from glm_grpo.models.glm_image.policy import ADAPTED_MODULES, GlmImagePolicy
from glm_grpo.models.glm_image.prompt_inputs import GLYPH_RULE
from glm_grpo.models.glm_image.token_grid import PIXELS_PER_TOKEN
from glm_grpo.models.module_sizes import describe_parameters
from rewards.problems import Problem

# Members of `ModelFamily`; mypy counts an imported one only if it is listed here.
__all__ = [
    "NAME",
    "TEXT_RULE",
    "build_decoder",
    "build_planner",
    "build_policy",
    "check_keys",
    "check_model",
    "check_sizes",
    "describe",
    "export",
    "hint_at_size",
    "knows_sizes",
    "load_pipeline",
]

TEXT_RULE: TextRule | None = GLYPH_RULE

_UNUSED_KEYS = ("rollout.guidance_scale",)

_LARGEST_AREA = 4
"""Largest ratio of an image's area to the smallest trained area: 2048 x 2048 to 1024 x 1024.
Source: zai-org/GLM-Image, issue 12."""


def check_keys(config: Config) -> None:
    """Refuse what has no effect, what the decoder lacks, and sizes with parts of tokens."""
    problems = [
        *unused_key_problems(config, _UNUSED_KEYS, name=NAME),
        *adapter_problems(config.model.adapter, ADAPTED_MODULES),
    ]
    for option, usual in (("steps", 20), ("guidance_scale", 1.5)):
        if getattr(config.decode, option) is None:
            key, rule = f"decode.{option}", f"must be set: the decoder of {NAME} denoises"
            problems.append(Problem(key, None, rule, f"set {key}={usual}"))
    for option in ("height", "width"):
        side = getattr(config.rollout, option)
        if side % PIXELS_PER_TOKEN:
            key = f"rollout.{option}"
            rule = f"must be a multiple of {PIXELS_PER_TOKEN}, the side of a token of {NAME}"
            near = max(1, round(side / PIXELS_PER_TOKEN)) * PIXELS_PER_TOKEN
            problems.append(Problem(key, side, rule, f"set {key}={near}"))
    refuse(problems)


def _denoising(config: Config) -> tuple[int, float]:
    """Steps and guidance of the decoder."""
    steps, guidance_scale = config.decode.steps, config.decode.guidance_scale
    if steps is None or guidance_scale is None:
        raise ConfigError(
            f"decode.steps is {steps} and decode.guidance_scale {guidance_scale}: both must be set "
            f"for {NAME}, whose decoder denoises"
        )
    return steps, guidance_scale


def check_sizes(path: str, config: Config) -> None:
    """Refuse sizes that the processor would change or cannot read."""
    height, width = config.rollout.height, config.rollout.width
    if config.data.sources > 0:
        check_source_size(path, height=height, width=width)
    if config.reads_targets:
        check_target_size(height=height, width=width)


def hint_at_size(path: str, config: Config) -> list[str]:
    """Hint on an image size outside of the published range."""
    side = trained_side(path)
    height, width = config.rollout.height, config.rollout.width
    size = f"rollout.height={height} rollout.width={width}"
    if side is None:
        return []
    if min(height, width) < side:
        return [
            f"{size}: the model was trained on images of {side} x {side} and larger. Smaller "
            "ones come out broken and their rewards mean nothing; use them only to test the setup. "
            f"Use at least {side} pixels per side"
        ]
    if height * width > _LARGEST_AREA * side**2:
        return [
            f"{size}: more than {_LARGEST_AREA * side**2:,} pixels, the largest size that the "
            f"model was trained on ({2 * side} x {2 * side}). Use smaller ones"
        ]
    return []


def knows_sizes(path: str) -> bool:
    """Whether it is the published model or a folder of one."""
    return path == PUBLISHED_ID or (Path(path) / "model_index.json").is_file()


def build_planner(path: str) -> GlmImagePlanner:
    """Build the planner from the configs of the parts."""
    # Configs alone, without an index, are enough.
    if path != PUBLISHED_ID and knows_sizes(path):
        check_index(Path(path))
    return GlmImagePlanner(read_part_configs(path), Path(path))


def describe(pipeline: GlmImagePipeline) -> str:
    """Name policy and decoder with their numbers of parameters, such as `4.8 M`."""
    policy = describe_parameters(pipeline.vision_language_encoder)
    decoder = describe_parameters(pipeline.transformer, pipeline.vae, pipeline.text_encoder)
    return f"policy ({policy} parameters) and decoder ({decoder})"


def build_policy(
    config: Config, pipeline: GlmImagePipeline, *, is_compiling: bool = False
) -> GlmImagePolicy:
    """Build the policy from the parts of a loaded pipeline."""
    return GlmImagePolicy(config, pipeline, is_compiling=is_compiling)


def build_decoder(
    config: Config, pipeline: GlmImagePipeline, *, is_compiling: bool
) -> GlmImageDecoder:
    """Build the decoder from the parts of a loaded pipeline."""
    steps, guidance_scale = _denoising(config)
    return GlmImageDecoder(
        pipeline,
        steps=steps,
        guidance_scale=guidance_scale,
        batch_size=config.decode.batch_size,
        # For evaluations: they have fewer samples per prompt than a rollout, so groups can be
        # joined.
        joined_size=config.rollout.group_size,
        vae_batch_size=config.decode.vae_batch_size,
        is_compiling=is_compiling,
    )


def export(
    policy: GlmImagePolicy,
    pipeline: GlmImagePipeline,
    settings: StockSettings,
    directory: Path,
    *,
    kind: Literal["adapter", "pipeline"],
) -> None:
    """Write a folder that peft or `GlmImagePipeline.from_pretrained` loads."""
    if policy.adapted_model is not None and kind == "adapter":
        export_adapter(policy.adapted_model, settings, directory)
    else:
        export_pipeline(policy, pipeline, settings, directory)
