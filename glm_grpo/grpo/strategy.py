"""Compute gradients in one process; `AccelerateStrategy` joins those of several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from glm_grpo.grpo.loss_scale import LossScale

T = TypeVar("T")


class Strategy:
    """How the processes that train one policy together join gradients and metrics; here: one.

    Each process replays its own sequences; gradients are averaged over the processes.

    Attributes:
        rank: Rank of this process, from 0.
        loss_scale: Factor of every loss in its backward pass; `clip_gradient` divides by it.
    """

    num_processes: int = 1
    rank: int = 0

    def __init__(self, loss_scale: LossScale | None = None) -> None:
        self.loss_scale = loss_scale or LossScale()

    def accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward pass of a micro-batch; the last one joins the gradients."""
        del is_last
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar, times the loss scale."""
        torch.autograd.backward(loss * self.loss_scale.value)

    def clip_gradient(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Undo the loss scale, and clip the joined gradient; returns its L2 norm before."""
        self.loss_scale.unscale(parameters)
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def gather(self, value: T) -> list[T]:
        """Every process's value, in rank order."""
        return [value]
