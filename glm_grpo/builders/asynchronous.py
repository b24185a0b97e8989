"""Build the collectors of an asynchronous run, and the source of what they collect."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from glm_grpo.builders.models import begin_with, find_start, load_models
from glm_grpo.builders.settings import collect_settings
from glm_grpo.collectors.ledger import Steps
from glm_grpo.collectors.ray_cluster import Needs, RayCluster
from glm_grpo.collectors.ray_collector import CollectorSettings
from glm_grpo.collectors.source import AsynchronousSource, CollectRequest, StaleSettings
from glm_grpo.config import Config
from glm_grpo.training.phase import Models
from glm_grpo.types import PromptBatch

BatchForStep = Callable[[int], PromptBatch]
"""Returns the prompts of a step, from 0."""


def collector_needs(config: Config) -> Needs:
    """Resources for the collectors of an asynchronous run."""
    section = config.asynchronous
    return Needs(section.collectors, section.cpus_per_collector, section.gpus_per_collector)


def build_collector_models(config: Config) -> Models:
    """Load a collector's models onto its accelerator, or onto the CPU.

    Raises:
        GlmGrpoError, RewardError: Loading failed.
    """
    # Ray does not hide accelerators from a process that asked for none.
    has_accelerator = config.asynchronous.gpus_per_collector > 0
    device = Accelerator().device if has_accelerator else torch.device("cpu")
    start = find_start(config)
    models = load_models(config, device, needs_reference=config.needs_reference)
    begin_with(models, start)
    return models


def build_asynchronous_source(
    config: Config,
    models: Models,
    batch_for_step: BatchForStep,
    cluster: RayCluster,
    *,
    first_step: int,
) -> AsynchronousSource:
    """Start the collectors.

    Args:
        models: Models of the learner.
        batch_for_step: Returns the prompts of a step, from 0.
        cluster: Cluster in which the collectors run.
        first_step: Next step to be learned, from 1.
    """
    # Nothing else needs Ray to be installed; the cluster has been started by now.
    from glm_grpo.collectors.ray_pool import RayPool  # noqa: PLC0415

    settings = CollectorSettings(
        make_models=partial(build_collector_models, config),
        threads=config.asynchronous.cpus_per_collector,
        folder=str(Path.cwd()),
    )
    pool = RayPool(cluster, collector_needs(config), settings)
    request = _collect_request(config, batch_for_step, first_step=first_step)
    return AsynchronousSource(pool, request, models)


def _collect_request(
    config: Config, batch_for_step: BatchForStep, *, first_step: int
) -> CollectRequest:
    section = config.asynchronous
    return CollectRequest(
        batch_for_step=batch_for_step,
        settings=collect_settings(config),
        steps=Steps(
            first=first_step,
            last=config.train.steps,
            updates_each=config.train.updates_per_step,
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
