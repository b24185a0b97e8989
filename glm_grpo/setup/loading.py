"""Load the models of a run, and place them on their devices."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from glm_grpo.config import Config
from glm_grpo.config.losses import CustomLoss
from glm_grpo.models.base import DTYPES
from glm_grpo.models.family import ModelFamily
from glm_grpo.models.find import FoundModel
from glm_grpo.models.offload import ModulePart, Movable, Offload
from glm_grpo.plan.processes import refuse_without_accelerator
from glm_grpo.run.finding import FoundCheckpoint
from glm_grpo.training.models import Models
from glm_grpo.training.out_of_memory import out_of_memory_explained
from rewards.build import build_scorer
from rewards.score import Scorer

logger = logging.getLogger(__name__)


def load_models(
    config: Config,
    model: FoundModel,
    device: torch.device,
    *,
    scorer: Scorer | None = None,
    start: FoundCheckpoint | None = None,
    is_sharded: bool = False,
) -> Models:
    """Load all models and place them on their devices.

    Args:
        scorer: Reward terms, from `load_scorer`; None: load them, too.
        start: Checkpoint whose weights policy and reference begin with; None: the model's own.
        is_sharded: Whether the engine places the policy's weights in shards.

    Raises:
        MemoryLimitError: Memory ran out.
    """
    if isinstance(config.loss, CustomLoss):
        config.loss.load()
    refuse_without_accelerator(config.model.quantization, is_on_accelerator=device.type != "cpu")
    scorer = scorer or load_scorer(config, device)
    with out_of_memory_explained("loading", f"{config.model.path} in {config.model.dtype}"):
        started = time.perf_counter()
        pipeline = model.family.load_pipeline(
            model.path,
            dtype=DTYPES[config.model.dtype],
            quantization=config.model.quantization,
            decoder_quantization=config.decode.quantization,
            quantize_on=device,
        )
        logger.info(
            "loaded %s of %s in %.1f s",
            model.family.describe(pipeline),
            config.model.path,
            time.perf_counter() - started,
        )
        models = place_models(
            config, model.family, pipeline, device, scorer=scorer, is_sharded=is_sharded
        )
    if start is not None:
        with start.checkpoint.named():
            models.policy.start_from(start.evaluated())
    return models


def load_scorer(config: Config, device: torch.device) -> Scorer:
    """Load the reward terms, which can tell which prompts they could score.

    Args:
        device: Device of the run.

    Raises:
        MemoryLimitError: Memory ran out.
    """
    started = time.perf_counter()
    with out_of_memory_explained("loading", f"terms {', '.join(config.reward.terms)}"):
        scorer = build_scorer(
            config.reward, torch.device("cpu") if _is_offloading(config, device) else device
        )
    seconds = time.perf_counter() - started
    logger.info("loaded terms %s in %.1f s", ", ".join(scorer.names), seconds)
    return scorer


def _is_offloading(config: Config, device: torch.device) -> bool:
    return config.offload != "none" and device.type != "cpu"


def place_models(
    config: Config,
    family: ModelFamily,
    pipeline: Any,
    device: torch.device,
    *,
    scorer: Scorer | None = None,
    is_sharded: bool = False,
) -> Models:
    """Place the parts of a loaded pipeline, and the reward terms, on their devices.

    Arguments as in `load_models`.
    """
    scorer = scorer or load_scorer(config, device)
    is_on_cuda = device.type == "cuda"
    if is_on_cuda:
        _keep_compiled()
    policy = family.build_policy(
        config,
        pipeline,
        is_compiling=is_on_cuda and config.model.compile and not is_sharded,
    )
    decoder = family.build_decoder(
        config,
        pipeline,
        is_compiling=is_on_cuda and config.decode.compile and config.decode.quantization is None,
    )
    reads_images = config.data.sources > 0 or config.reads_targets
    modules = {
        # An unused vision tower stays on the CPU; no phase uses it.
        "vision": policy.source_modules() if reads_images else (),
        "policy": policy.modules(),
        "reference": policy.reference.modules(),
        "decoder": decoder.modules(),
        "rewards": scorer.modules(),
    }
    parts: dict[str, Movable] = {}
    for name, group in modules.items():
        if name == "policy" and is_sharded:
            continue
        if _is_offloading(config, device):
            parts[name] = ModulePart(group, device=device)
        else:
            for module in group:
                module.to(device)
    return Models(policy=policy, decoder=decoder, scorer=scorer, offload=Offload(parts))


def _keep_compiled() -> None:
    """Let Inductor keep compiled code in the user's cache for the next run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "glm-grpo" / "inductor"))
