"""Get experience from collectors that work during learning, with policies that may be older."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from glm_grpo.collectors.collector_pool import (
    Collected,
    CollectorPool,
    Died,
    Event,
    Finished,
    Order,
    Outcome,
    Ready,
    Unusable,
)
from glm_grpo.collectors.ledger import Assignment, Ledger, Steps
from glm_grpo.config import Config
from glm_grpo.errors import CollectorError
from glm_grpo.training.models import Models
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import Experience, PromptBatch

logger = logging.getLogger(__name__)

MAX_DEATHS_IN_A_ROW = 3
"""Stop a run after this many collectors died without a batch made in between."""

_POLL_SECONDS = 0.1
"""Interval after which the thread looks for new orders."""

PATIENCE_SECONDS = 120.0
"""Time after which a waiting learner reports that there is no collector yet."""


@dataclass
class _Counts:
    """Counts since the last step was taken."""

    restarts: int = 0
    idle_seconds: float = 0.0


class AsynchronousSource:
    """Takes experience from a pool of collectors; implements `Collectors` of the training step.

    Args:
        pool: Pool of collectors; starts to work at once, and is closed with the source.
        models: Models of the learner, whose policy's weights are pushed.
        batch_for_step: Returns the prompts of a step, from 1; a pure function.
        first_step: Next step to be learned, from 1.
        now: Returns the seconds of a monotonic clock.
    """

    def __init__(
        self,
        pool: CollectorPool,
        models: Models,
        config: Config,
        batch_for_step: Callable[[int], PromptBatch],
        *,
        first_step: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pool, self._models, self._config, self._now = pool, models, config, now
        self._batch_for_step = batch_for_step
        steps = Steps(
            first=first_step,
            last=config.train.steps,
            updates_each=config.train.updates_per_step,
            max_age=config.asynchronous.max_policy_age,
            collectors=config.asynchronous.collectors,
        )
        updates = (first_step - 1) * steps.updates_each
        self._ledger: Ledger[Outcome] = Ledger(steps, updates)
        self._pushed = updates
        self._busy: dict[int, Assignment] = {}
        self._idle_since: dict[int, float] = {}
        self._counts = _Counts()
        self._is_anyone_ready = self._is_warned = False
        self._deaths_in_a_row = 0
        self._failure: Exception | None = None
        self._is_closing = threading.Event()
        # Held while any of the above is read or changed; notified when a result is available.
        self._changed = threading.Condition()
        pool.push(updates, self._weights())
        self._thread = threading.Thread(target=self._work, daemon=True, name="collectors")
        self._thread.start()

    def next_experience(
        self, step: int, clock: PhaseClock
    ) -> tuple[Experience, Mapping[str, float]]:
        """Wait for the experience of a step, and mark it if an older policy sampled it."""
        clock.announce("waiting")
        started = self._now()
        with self._changed:
            while (entry := self._ledger.take(step)) is None:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()
                self._warn_if_no_collector(self._now() - started)
            waited = self._now() - started
            metrics = self._metrics(waited)
            assignment, outcome = entry
            age = self._ledger.age(assignment)
        if not isinstance(outcome, Collected):
            raise outcome
        for phase, seconds in outcome.seconds.items():
            clock.add(phase, seconds)
        experience = replace(outcome.experience, is_stale=age > 0)
        return experience, {"async/policy_age": float(age), **metrics}

    def policy_updated(self, step: int) -> None:
        """Push the weights if that is due."""
        train = self._config.train
        if step == train.steps:
            return
        updates = step * train.updates_per_step
        if updates - self._pushed >= self._config.asynchronous.push_every:
            self._pool.push(updates, self._weights())
            self._pushed = updates
        with self._changed:
            self._ledger.push(self._pushed)
            self._pool.forget_before(self._ledger.oldest)
            self._give_out()

    def close(self) -> None:
        """End the collectors; their unfinished work is lost."""
        self._is_closing.set()
        self._thread.join()
        self._pool.close()

    def _work(self) -> None:
        """Run in the thread: handle the collectors' events, and give them their next orders."""
        try:
            while not self._is_closing.is_set():
                events = self._pool.wait(_POLL_SECONDS)
                with self._changed:
                    for event in events:
                        self._handle(event)
                    self._give_out()
                    self._changed.notify_all()
        # Passed to the thread that takes results; if this thread just ended, the learner would
        # hang.
        except Exception as error:
            self._fail(error)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Ready):
            self._is_anyone_ready = True
            self._idle_since[event.collector] = self._now()
        elif isinstance(event, Finished):
            del self._busy[event.collector]
            self._ledger.finish(event.number, event.outcome)
            self._idle_since[event.collector] = self._now()
            self._deaths_in_a_row = 0
        elif isinstance(event, Unusable):
            self._fail(event.error)
        else:
            self._replace(event)

    def _replace(self, death: Died) -> None:
        self._idle_since.pop(death.collector, None)
        assignment = self._busy.pop(death.collector, None)
        if assignment is not None:
            self._ledger.lose(assignment.number)
        self._deaths_in_a_row += 1
        self._counts.restarts += 1
        if self._deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            self._fail(
                CollectorError(
                    f"{MAX_DEATHS_IN_A_ROW} collectors died in a row without making a batch; the "
                    f"last one: {death.reason}. A machine's memory may be too small for "
                    "async.collectors"
                )
            )
            return
        batch = "" if assignment is None else f"; the batch of step {assignment.step} is made again"
        logger.warning("%s: another one replaces it%s", death.reason, batch)
        self._pool.replace(death.collector)

    def _give_out(self) -> None:
        for collector in sorted(self._idle_since):
            if self._failure is not None or (assignment := self._ledger.give_out()) is None:
                return
            self._counts.idle_seconds += self._now() - self._idle_since.pop(collector)
            self._busy[collector] = assignment
            self._pool.submit(
                collector,
                Order(
                    number=assignment.number,
                    batch=self._batch_for_step(assignment.step),
                    policy_updates=assignment.policy_updates,
                ),
            )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _warn_if_no_collector(self, waited: float) -> None:
        """Warn, because Ray silently lets a collector wait for free resources."""
        if self._is_anyone_ready or self._is_warned or waited < PATIENCE_SECONDS:
            return
        self._is_warned = True
        logger.warning(
            "no collector is ready after %.0f s: they are still loading their models, or no "
            "machine of the cluster has the free CPUs and GPUs that async.cpus_per_collector and "
            "async.gpus_per_collector require (see `ray status`)",
            waited,
        )

    def _metrics(self, waited: float) -> dict[str, float]:
        """Metrics for the time since the last step was taken."""
        now = self._now()
        for collector, since in self._idle_since.items():
            self._counts.idle_seconds += now - since
            self._idle_since[collector] = now
        counts, self._counts = self._counts, _Counts()
        return {
            "async/queue_length": float(self._ledger.waiting),
            "async/wait_learner_seconds": waited,
            "async/wait_collectors_seconds": counts.idle_seconds,
            "async/restarts": float(counts.restarts),
        }

    def _weights(self) -> Mapping[str, Tensor]:
        return {name: x.cpu() for name, x in self._models.policy.state_tensors().items()}
