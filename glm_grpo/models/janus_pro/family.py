"""Janus-Pro as a `ModelFamily`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from glm_grpo.config import Config
from glm_grpo.models.base import TextRule
from glm_grpo.models.export_page import StockSettings
from glm_grpo.models.family import adapter_problems, refuse, unused_key_problems
from glm_grpo.models.janus_pro.decoder import JanusProDecoder
from glm_grpo.models.janus_pro.export import export_adapter, export_folder
from glm_grpo.models.janus_pro.files import NAME
from glm_grpo.models.janus_pro.loading import JanusPro, check_model, image_side, load_pipeline
from glm_grpo.models.janus_pro.planner import (
    JanusProPlanner,
    find_config_folder,
    knows_sizes,
    read_sizes,
)
from glm_grpo.models.janus_pro.policy import ADAPTED_MODULES, JanusProPolicy
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

TEXT_RULE: TextRule | None = None

_UNUSED_KEYS = (
    "decode.steps",
    "decode.guidance_scale",
    "decode.rollout_steps",
    "decode.recheck_every",
    "decode.recheck_groups",
    "decode.min_rank_correlation",
    "decode.vae_batch_size",
    "decode.quantization",
    "sft.preview",
)
"""Keys of decoders that denoise, and of previews."""


def check_keys(config: Config) -> None:
    """Refuse what has no effect, and source images."""
    problems = [
        *unused_key_problems(config, _UNUSED_KEYS, name=NAME),
        *adapter_problems(config.model.adapter, ADAPTED_MODULES),
    ]
    if config.data.sources > 0:
        rule = f"must be 0: {NAME} draws from text alone"
        remedy = "set data.sources=0, or train a model that edits"
        problems.append(Problem("data.sources", config.data.sources, rule, remedy))
    refuse(problems)


def check_sizes(path: str, config: Config) -> None:
    """Refuse all sizes but that of the model's images."""
    if not knows_sizes(path):
        return
    side, problems = image_side(read_sizes(path)), []
    for option in ("height", "width"):
        given = getattr(config.rollout, option)
        if given != side:
            key, rule = f"rollout.{option}", f"must be {side}: the model draws no other size"
            problems.append(Problem(key, given, rule, f"set {key}={side}"))
    refuse(problems)


def hint_at_size(path: str, config: Config) -> list[str]:
    """Nothing: other sizes are refused."""
    return []


def build_planner(path: str) -> JanusProPlanner:
    """Build the planner from the config."""
    return JanusProPlanner(read_sizes(path), find_config_folder(path))


def describe(pipeline: JanusPro) -> str:
    """Name policy and decoder with their numbers of parameters, such as `1.5 B`."""
    model = pipeline.model.model
    generation = (model.generation_embeddings, model.generation_aligner, model.generation_head)
    policy = describe_parameters(model.language_model, *generation)
    decoder = describe_parameters(model.vqmodel.decoder, model.vqmodel.quantize)
    return f"policy ({policy} parameters) and decoder ({decoder})"


def build_policy(
    config: Config, pipeline: JanusPro, *, is_compiling: bool = False
) -> JanusProPolicy:
    """Build the policy; nothing of it is compiled."""
    return JanusProPolicy(config, pipeline)


def build_decoder(config: Config, pipeline: JanusPro, *, is_compiling: bool) -> JanusProDecoder:
    """Build the decoder; it is not compiled."""
    return JanusProDecoder(pipeline.model.model.vqmodel, batch_size=config.decode.batch_size)


def export(
    policy: JanusProPolicy,
    pipeline: JanusPro,
    settings: StockSettings,
    directory: Path,
    *,
    kind: Literal["adapter", "pipeline"],
) -> None:
    """Write a folder that peft or `JanusForConditionalGeneration.from_pretrained` loads."""
    if policy.adapted_model is not None and kind == "adapter":
        export_adapter(policy, policy.adapted_model, settings, directory)
    else:
        export_folder(policy, pipeline, settings, directory)
