"""Ledger of batches: steps given out in order, none twice, none lost, none grown too old.

The learner takes steps in order, and each brings the same number of updates. So the age that an
experience will have when it is trained on is known when its batch is given out, and a batch that
would come out too old is not given out yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from glm_grpo.training.collect import CollectSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """A batch that is given to a collector.

    Attributes:
        number: Counts assignments; a batch that is given out again has another one.
        step: Whose batch it is, from 1.
        policy_step: Updates of the weights it is sampled with.
        settings: How it is collected.
    """

    number: int
    step: int
    policy_step: int
    settings: CollectSettings


@dataclass(frozen=True)
class Steps:
    """Which steps are given out, and how far ahead.

    Attributes:
        first: The next to be learned, from 1.
        updates_each: Updates a step brings, >= 1.
        max_age: Updates between the weights that sample and those that learn, at most, >= 0.
        collectors: How many there are, >= 1.
    """

    first: int
    last: int
    updates_each: int
    max_age: int
    collectors: int

    @property
    def are_weights_settled(self) -> bool:
        """Whether there is a collector for every batch that may be on its way.

        Then no batch gains from waiting for newer weights, and its age need not depend on when
        a collector is ready: it takes the weights with which it may first be sampled.
        """
        return self.collectors > self.max_age // self.updates_each


class Ledger(Generic[T]):
    """Batches on their way; not safe for threads.

    Args:
        steps: Which, and how far ahead.
        policy_step: Updates of the weights the collectors have.
        settings_for_step: How the experience of a step, from 1, is made; the answer may change
            until the step before it is learned.
    """

    def __init__(
        self,
        steps: Steps,
        policy_step: int,
        settings_for_step: Callable[[int], CollectSettings],
    ) -> None:
        self._steps = steps
        self._settings_for_step = settings_for_step
        self._policy_step = policy_step
        self._next = steps.first
        self._count = 0
        self._under_way: dict[int, Assignment] = {}
        # Steps to give out before `_next`, and the updates of their weights: None for the newest.
        self._due: list[tuple[int, int | None]] = []
        self._finished: dict[int, tuple[Assignment, T]] = {}
        self._settle_weights()

    def push(self, policy_step: int) -> None:
        """The collectors have newer weights."""
        self._policy_step = policy_step
        self._settle_weights()

    def age(self, assignment: Assignment) -> int:
        """Updates between the weights that sampled and those that learn from it."""
        return (assignment.step - 1) * self._steps.updates_each - assignment.policy_step

    def give_out(self) -> Assignment | None:
        """The next batch for a collector that is idle; None where the next would be too old.

        Batches that were lost come first, with the weights they had: that they were lost changes no
        figure. Those that were withdrawn get the newest, unless weights are settled.
        """
        if self._due:
            self._due.sort(key=lambda entry: entry[0])
            step, policy_step = self._due.pop(0)
        elif self._may_begin(self._next):
            step, policy_step = self._next, None
            self._next += 1
        else:
            return None
        self._count += 1
        weights = self._policy_step if policy_step is None else policy_step
        assignment = Assignment(self._count, step, weights, self._settings_for_step(step))
        self._under_way[assignment.number] = assignment
        return assignment

    def finish(self, number: int, result: T) -> None:
        """A collector brings a result; that of a batch withdrawn meanwhile is thrown away."""
        assignment = self._under_way.pop(number, None)
        if assignment is not None:
            self._finished[assignment.step] = (assignment, result)

    def lose(self, number: int) -> None:
        """A collector died: its batch is given out again, as it was."""
        assignment = self._under_way.pop(number, None)
        if assignment is not None:
            self._due.append((assignment.step, assignment.policy_step))

    def withdraw_outdated(self) -> int:
        """Has batches collected again whose settings have changed since; how many there were."""
        finished = [assignment for assignment, _ in self._finished.values()]
        outdated = [
            each
            for each in (*finished, *self._under_way.values())
            if each.settings != self._settings_for_step(each.step)
        ]
        for each in outdated:
            self._under_way.pop(each.number, None)
            self._finished.pop(each.step, None)
            settled = each.policy_step if self._steps.are_weights_settled else None
            self._due.append((each.step, settled))
        return len(outdated)

    def take(self, step: int) -> tuple[Assignment, T] | None:
        """The result of a step, once; None where it is not there yet."""
        return self._finished.pop(step, None)

    @property
    def waiting(self) -> int:
        """Results that are there and not yet taken."""
        return len(self._finished)

    @property
    def oldest(self) -> int:
        """Updates of the oldest weights that a batch may still be sampled with."""
        due = [policy_step for _, policy_step in self._due if policy_step is not None]
        under_way = [each.policy_step for each in self._under_way.values()]
        # These may be withdrawn yet, and made again.
        finished = [each.policy_step for each, _ in self._finished.values()]
        return min([*due, *under_way, *finished, self._policy_step])

    def _settle_weights(self) -> None:
        while self._steps.are_weights_settled and self._may_begin(self._next):
            self._due.append((self._next, self._policy_step))
            self._next += 1

    def _may_begin(self, step: int) -> bool:
        """Whether there is such a step, and the newest weights are new enough for it."""
        age = (step - 1) * self._steps.updates_each - self._policy_step
        return step <= self._steps.last and age <= self._steps.max_age
