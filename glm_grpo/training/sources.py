"""Where the experience of a step comes from: made on the spot, or by collectors elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import CollectSettings, Stage, collect
from glm_grpo.training.data.prompts import part_of_batch
from glm_grpo.training.distributed.processes import Team
from glm_grpo.training.distributed.strategy import Engine
from glm_grpo.types import Experience, PromptBatch


@dataclass(frozen=True)
class Taken:
    """The experience of one step.

    Attributes:
        experience: To be learnt from.
        age: Updates the policy has had since the weights that sampled, >= 0.
        metrics: Of the source, by name.
    """

    experience: Experience
    age: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class ExperienceSource(Protocol):
    """Gives each step its experience, once, in the order of steps."""

    def take(self, step: int, clock: PhaseClock) -> Taken:
        """Wait for the experience of a step, from 1.

        Args:
            step: The one after the last that was learnt.
            clock: Gets the seconds of every phase, wherever it ran.

        Raises:
            RewardError: A term failed; names term, prompt and image.
            GlmGrpoError: It cannot be made.
        """
        ...

    def learnt(self, step: int) -> None:
        """The updates of a step are done."""
        ...

    def close(self) -> None:
        """No more is taken."""
        ...


class SynchronousSource:
    """Makes the experience of a step when it is asked for, with the learner's own models.

    Args:
        stage: The models.
        engine: Puts the policy's weights together.
        team: The processes, of which each makes its part.
        batch_for_step: All prompts of a step, from 0, a pure function of its number.
        settings_for_step: How the experience of a step, from 1, is made.
        updates: How many the policy has had.
    """

    def __init__(
        self,
        stage: Stage,
        engine: Engine,
        team: Team,
        *,
        batch_for_step: Callable[[int], PromptBatch],
        settings_for_step: Callable[[int], CollectSettings],
        updates: Callable[[], int],
    ) -> None:
        self._stage, self._engine, self._team = stage, engine, team
        self.batch_for_step = batch_for_step
        self._settings_for_step = settings_for_step
        self._updates = updates

    def take(self, step: int, clock: PhaseClock) -> Taken:
        """Samples, decodes and scores this process's part of a step's prompts."""
        with self._team.together():
            batch = self.batch_for_step(step - 1)
        with self._engine.whole_weights():
            experience = collect(
                self._stage,
                part_of_batch(batch, self._team.part(len(batch.prompts))),
                self._settings_for_step(step),
                policy_step=self._updates(),
                clock=clock,
                team=self._team,
            )
        return Taken(experience, age=0)

    def learnt(self, step: int) -> None:
        """The policy that samples is the one that learns."""

    def close(self) -> None:
        """There is nothing to close."""
