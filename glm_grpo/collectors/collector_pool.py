"""Protocol of collectors: their orders and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from glm_grpo.errors import GlmGrpoError
from glm_grpo.types import Experience, PromptBatch
from rewards.types import RewardError


@dataclass(frozen=True)
class Order:
    """What a collector is to make.

    Attributes:
        number: Number of the assignment, repeated in the result.
        policy_updates: Updates of the weights to sample with, which were pushed before.
    """

    number: int
    batch: PromptBatch
    policy_updates: int


@dataclass(frozen=True)
class Collected:
    """Result of a collector.

    Attributes:
        seconds: Seconds of every phase on the collector.
    """

    experience: Experience
    seconds: Mapping[str, float]


Outcome = Collected | RewardError | GlmGrpoError
"""An experience, or the error that prevented it."""


@dataclass(frozen=True)
class Ready:
    """A collector has loaded its models and waits for its first order."""

    collector: int


@dataclass(frozen=True)
class Finished:
    """A collector finished an order, successfully or with an error, and waits for the next."""

    collector: int
    number: int
    outcome: Outcome


@dataclass(frozen=True)
class Unusable:
    """A collector cannot be used, and replacing it would not help."""

    collector: int
    error: RewardError | GlmGrpoError


@dataclass(frozen=True)
class Died:
    """A collector's process or machine is gone.

    Attributes:
        collector: Its index.
        reason: What is known about it, for people.
    """

    collector: int
    reason: str


Event = Ready | Finished | Unusable | Died


@runtime_checkable
class CollectorPool(Protocol):
    """Collectors by index, from 0. One thread calls `wait`; any thread may call the rest."""

    def push(self, policy_updates: int, weights: Mapping[str, Tensor]) -> None:
        """Store weights for later orders.

        Args:
            policy_updates: Number of updates they have had.
            weights: Tensors in CPU memory; may change after this returns.
        """
        ...

    def forget_before(self, policy_updates: int) -> None:
        """Allow dropping weights with fewer updates, which no later order uses."""
        ...

    def submit(self, collector: int, order: Order) -> None:
        """Give an order to a waiting collector, without waiting for the result."""
        ...

    def wait(self, seconds: float) -> Sequence[Event]:
        """Return the events since the last call; waits up to `seconds` for one."""
        ...

    def replace(self, collector: int) -> None:
        """Start another collector in place of one that died."""
        ...

    def close(self) -> None:
        """End all collectors."""
        ...
