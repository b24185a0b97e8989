"""The learning side of a run: a policy and what updates it, progress and average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from glm_grpo.grpo.update import Learner
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.run.run_state import RunState
from glm_grpo.training.distributed.strategy import AccelerateStrategy
from glm_grpo.training.moving_average import MovingAverage


@dataclass(frozen=True, kw_only=True)
class RunLearner(Learner):
    """What the loop advances and checkpoints store.

    Attributes:
        strategy: Joins the gradients of the processes, and tensors from their shards.
        state: Progress of the run; not at step 0 if it resumes.
        average: Weights to evaluate; None: the current ones.
    """

    policy: AdaptedPolicy
    strategy: AccelerateStrategy
    state: RunState
    average: MovingAverage | None = None
