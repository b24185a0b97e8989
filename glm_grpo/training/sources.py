"""Sources of experience: produced synchronously, or by collectors in other processes."""

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
    """Gives each step its experience, once, in step order."""

    def next_experience(
        self, step: int, clock: PhaseClock
    ) -> tuple[Experience, Mapping[str, float]]:
        """Wait for the experience of a step.

        Args:
            step: Step after the last finished one, from 1.
            clock: Records the seconds of every phase, wherever it ran.

        Returns:
            Experience to train on, and the source's metrics by name.

        Raises:
            RewardError: A term failed; the message names term, prompt and image.
            GlmGrpoError: The experience cannot be made.
        """
        ...

    def policy_updated(self, step: int) -> None:
        """Notify the source that the updates of a step are done."""
        ...

    def close(self) -> None:
        """Stop; no more experience is needed."""
        ...


class SynchronousSource:
    """Makes the experience of a step on request, with the learner's own models.

    Args:
        models: Models of the learner.
        strategy: Gathers the policy's full parameters.
        processes: Processes of the run, each of which makes its part.
        batch_for_step: Returns all prompts of a step, from 0; a pure function.
        settings: How to make the experience.
        spares_for_step: Returns prompts that can replace those of a step, from 0; None: never
            replace any.
    """

    def __init__(
        self,
        models: Models,
        strategy: AccelerateStrategy,
        processes: Processes,
        *,
        batch_for_step: Callable[[int], PromptBatch],
        settings: CollectSettings,
        spares_for_step: Callable[[int], SparePrompts] | None = None,
    ) -> None:
        self._models, self._strategy, self._processes = models, strategy, processes
        self.batch_for_step = batch_for_step
        self._settings = settings
        self._spares_for_step = spares_for_step

    def next_experience(
        self, step: int, clock: PhaseClock
    ) -> tuple[Experience, Mapping[str, float]]:
        """Sample, decode and score this process's part of a step's prompts."""
        processes = self._processes
        with processes.together():
            batch = self.batch_for_step(step - 1)
            spares = self._spares_for_step
            others = None if spares is None else spares(step - 1)
        with self._strategy.full_parameters():
            experience = collect(
                self._models,
                part_of_batch(batch, processes.part(len(batch.prompts))),
                self._settings,
                clock=clock,
                processes=processes,
                spares=others,
            )
        return experience, {}

    def policy_updated(self, step: int) -> None:
        """Do nothing, because the sampling policy is the trained one."""

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""
