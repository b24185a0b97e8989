"""The learning side of a run: optimizer, learning rate, state and average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from glm_grpo.grpo.learning_rate import LearningRate
from glm_grpo.grpo.update import Trainee
from glm_grpo.models.base import Policy
from glm_grpo.run.run_state import RunState
from glm_grpo.training.distributed.strategy import AccelerateStrategy
from glm_grpo.training.moving_average import MovingAverage


@dataclass(frozen=True)
class Learner:
    """What the loop advances and checkpoints store.

    Attributes:
        optimizer: Optimizer over the policy's trainable parameters.
        learning_rate: Sets the optimizer's rate; also counts updates that leave the weights
            unchanged.
        strategy: Joins the gradients of the processes, and tensors from their shards.
        state: Progress of the run; not at step 0 if it resumes.
        average: Weights to evaluate; None: the current ones.
    """

    optimizer: Optimizer
    learning_rate: LearningRate
    strategy: AccelerateStrategy
    state: RunState
    average: MovingAverage | None = None

    def trainee(self, policy: Policy, max_grad_norm: float) -> Trainee:
        """What an update changes."""
        return Trainee(policy, self.optimizer, self.learning_rate, self.strategy, max_grad_norm)
