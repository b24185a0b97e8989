"""Compute gradients in one process; `AccelerateStrategy` joins those of several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Strategy:
    """How the processes that train one policy together join gradients and metrics; here: one.

    Each process replays its own sequences; gradients are averaged over the processes.

    Attributes:
        rank: Rank of this process, from 0.
    """

    num_processes: int = 1
    rank: int = 0

    def accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward pass of a micro-batch; the last one joins the gradients."""
        del is_last
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar."""
        torch.autograd.backward(loss)

    def clip_gradient(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale the joined gradient down to an L2 norm; returns the norm before scaling."""
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def gather(self, value: T) -> list[T]:
        """Every process's value, in rank order."""
        return [value]
