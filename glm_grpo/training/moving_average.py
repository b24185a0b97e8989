"""Exponential moving average of the trained weights, used for evaluation and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from glm_grpo.models.adapted_policy import AdaptedPolicy

_WARM_UP = 9
"""The average lags about a tenth of the steps done behind until `decay` allows no more."""


def decay_at(step: int, decay: float) -> float:
    """Decay of the update after a step, which grows from 0 to `decay`.

    min(decay, step / (step + 9)), and 0 after the first step, which leaves nothing of the base
    weights. Without this, the average of a short run would consist of them: after 20 steps of
    decay 0.999, 98 %.

    Source: `EMAModel.get_decay` of diffusers, (1 + n) / (10 + n) at its update n = step - 1.

    Args:
        step: Step that has just ended, >= 1.
        decay: Largest decay, in (0, 1).
    """
    return 0.0 if step == 1 else min(decay, step / (step + _WARM_UP))


def share_of_change(steps: int, decay: float) -> float:
    """Fraction of the training's change that the average holds, if the weights move evenly.

    Args:
        steps: Steps done, >= 1.
        decay: Largest decay, in (0, 1).
    """
    share = 0.0
    for step in range(1, steps + 1):
        share += (1.0 - decay_at(step, decay)) * (step / steps - share)
    return share


class MovingAverage:
    """average <- d * average + (1 - d) * weights, after each training step, d from `decay_at`.

    Kept in fp32 on the CPU. It lags about 1 / (1 - decay) steps behind the weights, at the start of
    a run a tenth of the steps done.

    Source: Polyak and Juditsky 1992, SIAM J. Control Optim. 30(4); in this form Kingma and Ba 2015
    (arXiv 1412.6980), section 7.2.

    Args:
        policy: Policy whose weights initialise the average.
        decay: Largest decay per training step, in (0, 1).
    """

    def __init__(self, policy: AdaptedPolicy, decay: float) -> None:
        self._policy = policy
        self._decay = decay
        self._tensors = self._weights()

    def update(self, step: int) -> None:
        """Include the weights of a finished step, counted from 1."""
        share = 1.0 - decay_at(step, self._decay)
        for name, weight in self._weights().items():
            # Updated in place, so that a fully trained policy needs one copy, not two.
            self._tensors[name].lerp_(weight, share)

    def tensors(self) -> Mapping[str, Tensor]:
        """The average, with the names of `AdaptedPolicy.state_tensors`."""
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
