"""The models of a run, on the accelerator in the phases of a step that use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.models.base import Decoder
from glm_grpo.models.offload import Offload, Phase
from glm_grpo.training.out_of_memory import out_of_memory_explained
from glm_grpo.training.phases import PhaseClock
from rewards.score import Scorer


@dataclass(frozen=True)
class Models:
    """The models of a run.

    Attributes:
        decoder: Frozen decoder, with all denoising steps if it has any, as in evaluations.
    """

    policy: AdaptedPolicy
    decoder: Decoder
    scorer: Scorer
    offload: Offload

    def with_decode_steps(self, steps: int | None) -> Models:
        """The same models with another number of denoising steps; None: unchanged."""
        if steps is None:
            return self
        return replace(self, decoder=self.decoder.with_steps(steps))

    @contextmanager
    def phase(
        self,
        phase: Phase,
        work: str,
        clock: PhaseClock | None = None,
        *,
        is_evaluation: bool = False,
    ) -> Iterator[None]:
        """Keep on the accelerator what the phase uses, and nothing else that is offloaded.

        Args:
            work: Description of the work, for the error if memory runs out.
            clock: Records the seconds, without moving models.
            is_evaluation: Whether to give the remedies for evaluations.

        Raises:
            MemoryLimitError: Memory ran out inside.
        """
        with (
            out_of_memory_explained("evaluation" if is_evaluation else phase, work),
            self.offload.phase(phase),
            (clock or PhaseClock()).phase(phase),
        ):
            yield
