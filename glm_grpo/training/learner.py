"""What learns in a run: optimizer, learning rate, state and average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from glm_grpo.run.run_state import RunState
from glm_grpo.training.distributed.strategy import AccelerateStrategy
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.moving_average import MovingAverage


@dataclass(frozen=True)
class Learner:
    """What learns, and how far it has come: the loop moves it on, checkpoints keep it.

    Attributes:
        optimizer: Over the policy's trainable parameters.
        learning_rate: Sets its rate; counts updates, also those that leave the weights alone.
        strategy: Joins the gradients of the processes, and tensors from their shards.
        state: Where the run stands; not at step 0 when it resumes.
        average: Weights to evaluate; None: the current ones.
    """

    optimizer: Optimizer
    learning_rate: LearningRate
    strategy: AccelerateStrategy
    state: RunState
    average: MovingAverage | None = None
