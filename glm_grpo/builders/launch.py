"""The processes and machines of a run, as builders receive them."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate import Accelerator

from glm_grpo.collectors.ray_cluster import RayCluster
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.metrics import StepWork


@dataclass(frozen=True)
class Launch:
    """Processes of the run, and where it collects.

    Attributes:
        processes: The processes, which agree through this object.
        cluster: Cluster of the collectors; None if this process collects.
        work: Operations of the models on the run's devices; None if the devices' peaks are unknown.
    """

    accelerator: Accelerator
    processes: Processes
    cluster: RayCluster | None = None
    work: StepWork | None = None
