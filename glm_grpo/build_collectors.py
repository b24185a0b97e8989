"""Config -> the collectors of an asynchronous run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from glm_grpo.build import load_stage
from glm_grpo.config import Config
from glm_grpo.training.asynchronous.ledger import Steps
from glm_grpo.training.asynchronous.ray_cluster import Needs, RayCluster
from glm_grpo.training.asynchronous.ray_collector import CollectorSettings
from glm_grpo.training.asynchronous.source import AsynchronousSource, Recipe
from glm_grpo.training.asynchronous.stale import StaleSettings
from glm_grpo.training.collect import Stage
from glm_grpo.training.monitors.recheck import Recheck
from glm_grpo.types import PromptBatch

BatchForStep = Callable[[int], PromptBatch]


def collector_needs(config: Config) -> Needs:
    """What the collectors of an asynchronous run take."""
    section = config.asynchronous
    return Needs(section.collectors, section.cpus_per_collector, section.gpus_per_collector)


def build_collector_stage(config: Config) -> Stage:
    """The models of a collector, on the accelerator that is kept for it, or on the CPU.

    Raises:
        GlmGrpoError, RewardError: Something cannot be loaded.
    """
    # Ray hides no accelerator from a process that asked for none.
    has_accelerator = config.asynchronous.gpus_per_collector > 0
    device = Accelerator().device if has_accelerator else torch.device("cpu")
    return load_stage(config, device, needs_reference=config.loss.kl_coef > 0)


def build_asynchronous_source(
    config: Config,
    stage: Stage,
    batch_for_step: BatchForStep,
    recheck: Recheck,
    cluster: RayCluster,
    *,
    first_step: int,
) -> AsynchronousSource:
    """Starts the collectors.

    Args:
        config: Of the run.
        stage: The learner's.
        batch_for_step: The prompts of a step, from 0.
        recheck: Says how the pictures of a step are decoded.
        cluster: In which the collectors run.
        first_step: The next to be learnt, from 1.
    """
    # Ray need not be installed for anything else, and the cluster has set it up by now.
    from glm_grpo.training.asynchronous.ray_pool import RayPool  # noqa: PLC0415

    settings = CollectorSettings(
        make_stage=partial(build_collector_stage, config),
        threads=config.asynchronous.cpus_per_collector,
        folder=str(Path.cwd()),
    )
    pool = RayPool(cluster, collector_needs(config), settings)
    recipe = _recipe(config, batch_for_step, recheck, first_step=first_step)
    return AsynchronousSource(pool, recipe, stage)


def _recipe(
    config: Config, batch_for_step: BatchForStep, recheck: Recheck, *, first_step: int
) -> Recipe:
    section = config.asynchronous
    return Recipe(
        batch_for_step=batch_for_step,
        settings_for_step=recheck.collect_settings,
        steps=Steps(
            first=first_step,
            last=config.train.steps,
            updates_each=config.train.updates_per_rollout,
            max_age=section.max_policy_age,
            collectors=section.collectors,
        ),
        push_every=section.push_every,
        stale=StaleSettings(
            treatment=section.on_stale,
            max_importance_ratio=section.max_importance_ratio,
            min_importance_ratio=section.min_importance_ratio or 0.0,
            micro_batch_size=config.train.micro_batch_size,
        ),
    )
