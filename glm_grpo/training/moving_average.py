"""Exponential moving average of the trained weights, used for evaluation and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from glm_grpo.models.base import Policy


class MovingAverage:
    """average <- decay * average + (1 - decay) * weights, after each training step.

    Kept in fp32 on the CPU. It starts at the untrained weights without bias correction, so an
    evaluation shows a policy that lags about 1 / (1 - decay) steps behind.

    Source: Polyak and Juditsky 1992, SIAM J. Control Optim. 30(4); in this form Kingma and Ba 2015
    (arXiv 1412.6980), section 7.2.

    Args:
        policy: Policy whose weights initialise the average.
        decay: Decay per training step, in (0, 1).
    """

    def __init__(self, policy: Policy, decay: float) -> None:
        self._policy = policy
        self._decay = decay
        self._tensors = self._weights()

    def update(self) -> None:
        """Include the weights of a finished step."""
        for name, weight in self._weights().items():
            # Updated in place, so that a fully trained policy needs one copy, not two.
            self._tensors[name].lerp_(weight, 1.0 - self._decay)

    def tensors(self) -> Mapping[str, Tensor]:
        """The average, with the names of `Policy.state_tensors`."""
        return self._tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        self._tensors = {name: tensor.float().clone() for name, tensor in tensors.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Load the average into the policy; restore its exact weights on exit."""
        # On the CPU: for a fully trained policy, the accelerator may lack memory for a second copy.
        own = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self._policy.state_tensors().items()
        }
        self._policy.load_state_tensors(
            {name: self._tensors[name].to(tensor.dtype) for name, tensor in own.items()}
        )
        try:
            yield
        finally:
            self._policy.load_state_tensors(own)

    def _weights(self) -> dict[str, Tensor]:
        weights = self._policy.state_tensors()
        return {
            # Always a copy, even if it is on the CPU in fp32 already.
            name: tensor.detach().to("cpu", torch.float32, copy=True)
            for name, tensor in weights.items()
        }
