"""Run collectors as Ray actors; import this only if Ray is installed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from torch import Tensor

from glm_grpo.collectors.collector_pool import (
    Collected,
    Died,
    Event,
    Finished,
    Order,
    Ready,
    Unusable,
)
from glm_grpo.collectors.ray_cluster import RayCluster
from glm_grpo.collectors.ray_collector import Collector, CollectorProcess, CollectorSetup
from glm_grpo.config.sections import AsyncSection
from glm_grpo.errors import CollectorError, GlmGrpoError
from rewards.types import RewardError

_DEATHS = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
)
"""Ray's errors about a lost process or machine."""


@dataclass(frozen=True)
class _Job:
    """A pending request to a collector; `number` is None for its preparation."""

    collector: int
    number: int | None


class RayPool:
    """A pool of collecting actors.

    Args:
        cluster: Cluster in which they run; closed with the pool.
        section: Their number, and the resources of each.
    """

    def __init__(self, cluster: RayCluster, section: AsyncSection, setup: CollectorSetup) -> None:
        self._cluster = cluster
        actor_class = ray.remote(Collector)
        # The source replaces a dead actor, because it knows what the actor was doing.
        self._make = actor_class.options(
            num_cpus=section.cpus_per_collector,
            num_gpus=section.gpus_per_collector,
            max_restarts=0,
            max_task_retries=0,
        ).remote
        self._setup = ray.put(setup)
        self._weights: dict[int, Any] = {}
        self._jobs: dict[Any, _Job] = {}
        self._places: dict[int, Any] = {}
        self._actors = [self._start(index) for index in range(section.collectors)]

    def push(self, policy_updates: int, weights: Mapping[str, Tensor]) -> None:
        """Put weights into the object store."""
        self._weights[policy_updates] = ray.put(dict(weights))

    def forget_before(self, policy_updates: int) -> None:
        """Let the object store drop weights with fewer updates."""
        for old in [updates for updates in self._weights if updates < policy_updates]:
            del self._weights[old]

    def submit(self, collector: int, order: Order) -> None:
        """Give an order to a collector."""
        weights = self._weights[order.policy_updates]
        reference = self._actors[collector].collect.remote(order, weights)
        self._jobs[reference] = _Job(collector, order.number)

    def wait(self, seconds: float) -> Sequence[Event]:
        """Return the events since the last call."""
        asked = list(self._jobs)
        if not asked:
            time.sleep(seconds)
            return []
        done, _ = ray.wait(asked, num_returns=1, timeout=seconds)
        return [self._event(reference, self._jobs.pop(reference)) for reference in done]

    def replace(self, collector: int) -> None:
        """Start another actor, and end what remains of the old one."""
        ray.kill(self._actors[collector], no_restart=True)
        self._actors[collector] = self._start(collector)

    def close(self) -> None:
        """Disconnect from the cluster, which ends the actors."""
        self._cluster.close()

    def _start(self, collector: int) -> Any:
        actor = self._make(self._setup)
        self._places[collector] = actor.place.remote()
        self._jobs[actor.prepare.remote()] = _Job(collector, None)
        return actor

    def _event(self, reference: Any, job: _Job) -> Event:
        try:
            result = ray.get(reference)
        except RayTaskError as error:
            # A bug, which only the traceback locates.
            result = CollectorError(f"it failed\n{error}")
        except ActorDiedError as error:
            if error.actor_init_failed:
                # Another machine would fail too, most likely because a package is missing there.
                failure = CollectorError(f"a collector could not be started\n{error}")
                return Unusable(job.collector, failure)
            return self._death(job.collector, error)
        except _DEATHS as error:
            return self._death(job.collector, error)
        if job.number is not None:
            return Finished(job.collector, job.number, self._named(job.collector, result))
        if result is None:
            return Ready(job.collector)
        return Unusable(job.collector, self._named(job.collector, result))

    def _death(self, collector: int, error: RayError) -> Died:
        reason = str(error).strip().partition("\n")[0]
        return Died(collector, f"{self._describe(collector)} died ({reason})")

    def _named(self, collector: int, result: Any) -> Any:
        """Prefix an error with the collector's name; errors of terms already name their subject."""
        if isinstance(result, Collected | RewardError):
            return result
        error: GlmGrpoError = result
        return type(error)(f"{self._describe(collector)}: {error}")

    def _describe(self, collector: int) -> str:
        name = f"collector {collector}"
        with contextlib.suppress(*_DEATHS, GetTimeoutError):
            place: CollectorProcess = ray.get(self._places[collector], timeout=1.0)
            name += f" (process {place.process_id} on {place.host})"
        return name
