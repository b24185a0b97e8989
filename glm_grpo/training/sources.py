"""Sources of experience: made on the spot, or by collectors elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from glm_grpo.data.prompts import SparePrompts, part_of_batch
from glm_grpo.training.collect import CollectSettings, collect
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.distributed.strategy import AccelerateStrategy
from glm_grpo.training.phase import Models, PhaseClock
from glm_grpo.types import Experience, PromptBatch


@runtime_checkable
class ExperienceSource(Protocol):
    """Gives each step its experience, once, in the order of steps."""

    def next_experience(
        self, step: int, clock: PhaseClock
    ) -> tuple[Experience, Mapping[str, float]]:
        """Wait for the experience of a step, from 1.

        Args:
            step: The one after the last whose updates are done.
            clock: Gets the seconds of every phase, wherever it ran.

        Returns:
            What is trained on, and metrics of the source by name.

        Raises:
            RewardError: A term failed; names term, prompt and image.
            GlmGrpoError: It cannot be made.
        """
        ...

    def policy_updated(self, step: int) -> None:
        """The updates of a step are done."""
        ...

    def close(self) -> None:
        """No more is asked for."""
        ...


class SynchronousSource:
    """Makes the experience of a step when it is asked for, with the learner's own models.

    Args:
        models: The learner's.
        strategy: Puts the policy's parameters together.
        processes: Of which each makes its part.
        batch_for_step: All prompts of a step, from 0, a pure function of its number.
        settings_for_step: How the experience of a step, from 1, is made.
        updates: How many the policy has had.
        spares_for_step: Prompts that can take the place of those of a step, from 0; None: none do.
    """

    def __init__(
        self,
        models: Models,
        strategy: AccelerateStrategy,
        processes: Processes,
        *,
        batch_for_step: Callable[[int], PromptBatch],
        settings_for_step: Callable[[int], CollectSettings],
        updates: Callable[[], int],
        spares_for_step: Callable[[int], SparePrompts] | None = None,
    ) -> None:
        self._models, self._strategy, self._processes = models, strategy, processes
        self.batch_for_step = batch_for_step
        self._settings_for_step = settings_for_step
        self._updates = updates
        self._spares_for_step = spares_for_step

    def next_experience(
        self, step: int, clock: PhaseClock
    ) -> tuple[Experience, Mapping[str, float]]:
        """Samples, decodes and scores this process's part of a step's prompts."""
        processes = self._processes
        with processes.together():
            batch = self.batch_for_step(step - 1)
            spares = self._spares_for_step
            others = None if spares is None else spares(step - 1)
        with self._strategy.full_parameters():
            experience = collect(
                self._models,
                part_of_batch(batch, processes.part(len(batch.prompts))),
                self._settings_for_step(step),
                policy_step=self._updates(),
                clock=clock,
                processes=processes,
                spares=others,
            )
        return experience, {}

    def policy_updated(self, step: int) -> None:
        """The policy that samples is the one that learns."""

    def close(self) -> None:
        """There is nothing to close."""
