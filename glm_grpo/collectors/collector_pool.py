"""Collectors, wherever they run: what is asked of them, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from glm_grpo.errors import GlmGrpoError
from glm_grpo.training.collect import CollectSettings
from glm_grpo.types import Experience, PromptBatch
from rewards.types import RewardError


@dataclass(frozen=True)
class Order:
    """What a collector is to make.

    Attributes:
        number: Of the assignment; the result bears it.
        batch: Prompts and seeds.
        settings: How.
        policy_step: Updates of the weights it is sampled with; they were pushed before.
    """

    number: int
    batch: PromptBatch
    settings: CollectSettings
    policy_step: int


@dataclass(frozen=True)
class Collected:
    """What a collector made.

    Attributes:
        experience: In CPU memory.
        seconds: Of every phase, on the collector.
    """

    experience: Experience
    seconds: Mapping[str, float]


Outcome = Collected | RewardError | GlmGrpoError
"""An experience, or why there is none."""


@dataclass(frozen=True)
class Ready:
    """A collector has its models and waits for its first order."""

    collector: int


@dataclass(frozen=True)
class Finished:
    """A collector ended an order, well or with an error, and waits for the next."""

    collector: int
    number: int
    outcome: Outcome


@dataclass(frozen=True)
class Unusable:
    """A collector cannot be used, and another one in its place could not either."""

    collector: int
    error: RewardError | GlmGrpoError


@dataclass(frozen=True)
class Died:
    """A collector's process, or its machine, is gone.

    Attributes:
        collector: Its index.
        reason: What is known of it, for a person.
    """

    collector: int
    reason: str


Event = Ready | Finished | Unusable | Died


@runtime_checkable
class CollectorPool(Protocol):
    """Collectors by index, from 0. `wait` is called by one thread, all else by any."""

    def push(self, policy_step: int, weights: Mapping[str, Tensor]) -> None:
        """Keep weights for orders to come.

        Args:
            policy_step: Updates they have had.
            weights: In CPU memory; may change once this returns.
        """
        ...

    def forget_before(self, policy_step: int) -> None:
        """Weights with fewer updates are not asked for any more."""
        ...

    def submit(self, collector: int, order: Order) -> None:
        """Give an order to a collector that waits for one; does not wait for it."""
        ...

    def wait(self, seconds: float) -> Sequence[Event]:
        """What happened since the last call; waits so long for something to happen."""
        ...

    def replace(self, collector: int) -> None:
        """Start another collector in the place of one that died."""
        ...

    def close(self) -> None:
        """End all collectors."""
        ...
