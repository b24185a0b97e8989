"""Start the collectors of an asynchronous run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from glm_grpo.collectors.ray_cluster import RayCluster
from glm_grpo.collectors.ray_collector import CollectorSetup
from glm_grpo.collectors.source import AsynchronousSource
from glm_grpo.config import Config
from glm_grpo.models.find import find_model
from glm_grpo.setup.loading import load_models
from glm_grpo.setup.prepared_run import PreparedRun
from glm_grpo.setup.start import find_start
from glm_grpo.training.batches import build_batch
from glm_grpo.training.models import Models


def load_collector_models(
    config: Config, *, has_start: bool, reference: Mapping[str, Tensor]
) -> Models:
    """Load a collector's models onto its accelerator, or onto the CPU.

    Args:
        has_start: Whether to read the checkpoint in `model.start_from`.
        reference: Tensors of the learner's reference.
    """
    # Ray does not hide accelerators from a process that asked for none.
    has_accelerator = config.asynchronous.gpus_per_collector > 0
    device = Accelerator().device if has_accelerator else torch.device("cpu")
    start = find_start(config) if has_start else None
    models = load_models(config, find_model(config.model.path), device, start=start)
    models.policy.reference.load_tensors(reference)
    return models


def collector_setup(prepared: PreparedRun, models: Models) -> CollectorSetup:
    """How to set up the collectors of a run.

    Args:
        models: Models of the learner, restored if the run is resumed.
    """
    load = partial(
        load_collector_models,
        # A resumed run may no longer have the checkpoint that it started from.
        has_start=prepared.start is not None,
        reference=models.policy.reference.tensors(),
    )
    return CollectorSetup(prepared.config, load, folder=str(Path.cwd()))


def start_collectors(
    prepared: PreparedRun, models: Models, cluster: RayCluster, *, first_step: int
) -> AsynchronousSource:
    """Start the collectors.

    Args:
        first_step: Next step to be learned, from 1.
    """
    # Nothing else needs Ray to be installed; the cluster has been started by now.
    from glm_grpo.collectors.ray_pool import RayPool  # noqa: PLC0415

    config = prepared.config
    pool = RayPool(cluster, config.asynchronous, collector_setup(prepared, models))
    batch_for_step = partial(build_batch, config, prepared.prompts.training)
    return AsynchronousSource(pool, models, config, batch_for_step, first_step=first_step)
