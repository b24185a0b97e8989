"""Config and model of the benchmarks: configs/tiny.yaml and the embedded model."""

from __future__ import annotations

import torch
from diffusers import GlmImagePipeline

from benchmarks.timing import ROOT
from glm_grpo.config import Config, compose_config
from glm_grpo.models.find import find_model
from glm_grpo.models.glm_image.loading import load_pipeline
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.training.batches import build_batch
from glm_grpo.types import PromptBatch

CPU = torch.device("cpu")


def tiny_config(
    *overrides: str, prompts: int | None = None, group_size: int | None = None
) -> Config:
    """Load configs/tiny.yaml.

    Args:
        overrides: As on the command line.
        prompts: P; None: as in the config.
        group_size: G; None: as in the config. If both are given, P x G sequences are replayed at
            once.
    """
    sizes = []
    if prompts is not None and group_size is not None:
        sizes = [
            f"rollout.prompts_per_step={prompts}",
            f"rollout.group_size={group_size}",
            f"train.micro_batch_size={prompts * group_size}",
        ]
    return compose_config(ROOT / "configs", "tiny", [*sizes, *overrides])


def first_batch(config: Config) -> PromptBatch:
    """Prompts of the first step."""
    return build_batch(config, prepare(config).prompts.training, 1)


def stock_pipeline() -> GlmImagePipeline:
    """Load the published pipeline with the embedded model anew, without its progress bar."""
    pipeline = load_pipeline(find_model("tiny").path, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
