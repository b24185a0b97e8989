"""Assign batches to collectors in step order, without losing, repeating or outdating any.

The learner takes steps in order, and each brings the same number of updates. The age that an
experience will have when it is trained on is therefore known when its batch is assigned, and a
batch that would become too old is not assigned yet.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """A batch that is assigned to a collector.

    Attributes:
        number: Counts assignments; a reassigned batch gets a new number.
        policy_updates: Updates of the weights it is sampled with.
    """

    number: int
    step: int
    policy_updates: int


@dataclass(frozen=True)
class Steps:
    """Which steps to assign, and how far ahead.

    Attributes:
        first: Next step to be learned, from 1.
        updates_each: Updates per step, >= 1.
        max_age: Largest number of updates by which sampling weights may lag behind the learner, >=
            0.
        collectors: Number of collectors, >= 1.
    """

    first: int
    last: int
    updates_each: int
    max_age: int
    collectors: int

    @property
    def are_weights_settled(self) -> bool:
        """Whether there is a collector for every batch that may be in flight.

        If so, no batch gains from waiting for newer weights. Its age then does not depend on when a
        collector is ready: it uses the first weights with which it may be sampled.
        """
        return self.collectors > self.max_age // self.updates_each


class Ledger(Generic[T]):
    """Batches in flight; not thread-safe.

    Args:
        steps: Which steps to assign, and how far ahead.
        policy_updates: Updates of the weights that the collectors have.
    """

    def __init__(self, steps: Steps, policy_updates: int) -> None:
        self._steps = steps
        self._numbers = itertools.count(1)
        self._next_step = steps.first
        # A step is in one of these, or was taken. Due steps, with the updates of the weights to
        # sample them with; None: the newest at that time.
        self._due: dict[int, int | None] = {}
        self._under_way: dict[int, Assignment] = {}
        self._finished: dict[int, tuple[Assignment, T]] = {}
        self.push(policy_updates)

    def push(self, policy_updates: int) -> None:
        """Note that the collectors have newer weights, which are new enough for more steps."""
        self._policy_updates = policy_updates
        while (
            self._next_step <= self._steps.last
            and self._age(self._next_step, policy_updates) <= self._steps.max_age
        ):
            self._due[self._next_step] = policy_updates if self._steps.are_weights_settled else None
            self._next_step += 1

    def age(self, assignment: Assignment) -> int:
        """Updates by which the weights that sampled lag behind those that learn from it."""
        return self._age(assignment.step, assignment.policy_updates)

    def give_out(self) -> Assignment | None:
        """Assign the earliest due batch to an idle collector; None if none is due."""
        if not self._due:
            return None
        step = min(self._due)
        settled = self._due.pop(step)
        policy_updates = self._policy_updates if settled is None else settled
        assignment = Assignment(next(self._numbers), step, policy_updates)
        self._under_way[assignment.number] = assignment
        return assignment

    def finish(self, number: int, result: T) -> None:
        """Accept a collector's result."""
        assignment = self._under_way.pop(number)
        self._finished[assignment.step] = (assignment, result)

    def lose(self, number: int) -> None:
        """Handle a dead collector: its batch is due again with the same weights and result."""
        assignment = self._under_way.pop(number)
        self._due[assignment.step] = assignment.policy_updates

    def take(self, step: int) -> tuple[Assignment, T] | None:
        """Return the result of a step, once; None if it is not available yet."""
        return self._finished.pop(step, None)

    @property
    def waiting(self) -> int:
        """Number of results that are available but not taken."""
        return len(self._finished)

    @property
    def oldest(self) -> int:
        """Updates of the oldest weights with which a batch may still be sampled."""
        due = [updates for updates in self._due.values() if updates is not None]
        under_way = [each.policy_updates for each in self._under_way.values()]
        return min([*due, *under_way, self._policy_updates])

    def _age(self, step: int, policy_updates: int) -> int:
        """Updates between the weights that sample a step's batch and those that learn from it."""
        return (step - 1) * self._steps.updates_each - policy_updates
