"""Load and place the models of a run: policy, decoder and reward terms."""

from __future__ import annotations

import logging
import os
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from glm_grpo.builders.family import family_of
from glm_grpo.config import TINY, Config
from glm_grpo.config.losses import CustomLoss
from glm_grpo.data.places import nearest_beside
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.models.base import DTYPES, Quantization
from glm_grpo.models.offload import ModulePart, Movable, Offload
from glm_grpo.models.planning import Planner
from glm_grpo.training.phase import Models, out_of_memory_explained
from glm_grpo.training.resume import FoundCheckpoint, find_checkpoint
from rewards.build import build_scorer
from rewards.problems import Problem, describe_problems

logger = logging.getLogger(__name__)


def model_path(path: str) -> str:
    """Resolve `tiny` to the folder inside the package; return other paths unchanged."""
    return str(files("glm_grpo.tiny") / "weights" / "pipeline") if path == TINY else path


def build_planner(path: str) -> Planner:
    """Build the planner for runs of a model.

    Raises:
        ModelError: The model's configs are not available.
    """
    return family_of(path).build_planner(model_path(path))


def hint_at_size(config: Config) -> list[str]:
    """Hint on an image size for which the model was not trained."""
    path = config.model.path
    return family_of(path).hint_at_size(model_path(path), config)


def find_planner(path: str) -> Planner | None:
    """Like `build_planner`, but None for a hub id whose sizes are unknown.

    A folder that is not a model is refused when it is loaded.
    """
    return build_planner(path) if family_of(path).knows_sizes(model_path(path)) else None


def find_start(config: Config) -> FoundCheckpoint | None:
    """Find and verify the checkpoint in `model.start_from`; None if it is not set.

    Raises:
        ConfigError: Its run trained another kind of weights.
        CheckpointError: There is no intact checkpoint.
    """
    path = config.model.start_from
    if path is None:
        return None
    if not Path(path).exists():
        nearest = nearest_beside(path)
        meant = "." if nearest is None else f"; did you mean {nearest}?"
        raise CheckpointError(
            f"model.start_from = {path!r} does not exist{meant} A run starts from its weights, "
            "and its KL refers to them when it is resumed: restore it, or name another"
        )
    found = find_checkpoint(Path(path))
    own, theirs = config.model.adapter, found.config.model.adapter
    if own != theirs:
        rule = f"was trained with model.adapter = {theirs}, and this run has {own}"
        remedy = (
            "set model.adapter as in its config.yaml, or export that run as a pipeline (glm-grpo "
            "export) and set model.path to it"
        )
        raise ConfigError(describe_problems([Problem("model.start_from", path, rule, remedy)]))
    return found


def begin_with(models: Models, start: FoundCheckpoint | None) -> None:
    """Load the weights of a checkpoint into policy and reference.

    Raises:
        CheckpointError: They do not match the model.
    """
    if start is not None:
        with start.checkpoint.named():
            models.policy.start_from(start.evaluated)


def load_models(
    config: Config, device: torch.device, *, needs_reference: bool, is_sharded: bool = False
) -> Models:
    """Like `build_models`, but explains out-of-memory errors.

    Raises:
        GlmGrpoError, RewardError: Loading failed.
    """
    with out_of_memory_explained("loading", f"{config.model.path} in {config.model.dtype}"):
        return build_models(config, device, needs_reference=needs_reference, is_sharded=is_sharded)


def build_models(
    config: Config, device: torch.device, *, needs_reference: bool, is_sharded: bool = False
) -> Models:
    """Load all models and place them on their devices.

    Args:
        needs_reference: Whether a KL to the untrained policy has a weight.
        is_sharded: Whether the engine places the policy's weights in shards.

    Raises:
        ConfigError: 4-bit weights are requested without an accelerator, or the function of a custom
            loss cannot be imported.
        ModelError: The model cannot be loaded.
    """
    if isinstance(config.loss, CustomLoss):
        config.loss.load()
    refuse_without_accelerator(config.model.quantization, is_on_accelerator=device.type != "cpu")
    started = time.perf_counter()
    family = family_of(config.model.path)
    pipeline = family.load_pipeline(
        model_path(config.model.path),
        dtype=DTYPES[config.model.dtype],
        quantization=Quantization(
            language=config.model.quantization, decoder=config.decode.quantization
        ),
        quantize_on=device,
    )
    logger.info(
        "loaded %s of %s in %.1f s",
        family.describe(pipeline),
        config.model.path,
        time.perf_counter() - started,
    )
    return place_models(
        config, pipeline, device, needs_reference=needs_reference, is_sharded=is_sharded
    )


def place_models(
    config: Config,
    pipeline: Any,
    device: torch.device,
    *,
    needs_reference: bool,
    is_sharded: bool = False,
) -> Models:
    """Place the parts of a loaded pipeline, and the reward terms, on their devices.

    Arguments as in `build_models`.
    """
    is_on_cuda = device.type == "cuda"
    if is_on_cuda:
        _keep_compiled()
    family = family_of(config.model.path)
    policy = family.build_policy(
        config,
        pipeline,
        needs_reference=needs_reference,
        is_compiling=is_on_cuda and config.model.compile and not is_sharded,
    )
    decoder = family.build_decoder(
        config,
        pipeline,
        is_compiling=is_on_cuda and config.decode.compile and config.decode.quantization is None,
    )
    is_offloading = config.offload != "none" and device.type != "cpu"
    started = time.perf_counter()
    scorer = build_scorer(config.reward, torch.device("cpu") if is_offloading else device)
    seconds = time.perf_counter() - started
    logger.info("loaded terms %s in %.1f s", ", ".join(scorer.names), seconds)
    reads_pictures = config.data.sources > 0 or config.reads_targets
    modules = {
        # An unused vision tower stays on the CPU; no phase uses it.
        "vision": policy.source_modules() if reads_pictures else (),
        "policy": policy.modules(),
        "reference": policy.reference_modules(),
        "decoder": decoder.modules(),
        "rewards": scorer.modules(),
    }
    parts: dict[str, Movable] = {}
    for name, group in modules.items():
        if name == "policy" and is_sharded:
            continue
        if is_offloading:
            parts[name] = ModulePart(group, device=device)
        else:
            for module in group:
                module.to(device)
    return Models(policy=policy, decoder=decoder, scorer=scorer, offload=Offload(parts))


def _keep_compiled() -> None:
    """Let Inductor keep compiled code in the user's cache for the next run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "glm-grpo" / "inductor"))


def refuse_without_accelerator(quantization: str | None, *, is_on_accelerator: bool) -> None:
    """Check the accelerator before anything is loaded.

    Args:
        is_on_accelerator: Whether there is an accelerator.

    Raises:
        ConfigError: 4-bit weights are requested without an accelerator.
    """
    if quantization is not None and not is_on_accelerator:
        raise ConfigError(
            f"model.quantization is {quantization!r}: 4-bit weights need an accelerator, and none "
            "was found; leave model.quantization out"
        )
