"""Join the processes of a run: the protocol, and its implementation for one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

T = TypeVar("T")


@runtime_checkable
class Strategy(Protocol):
    """Joins the gradients and metrics of the processes that train one policy together.

    Each process replays its own sequences; gradients are averaged over the processes.
    """

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        ...

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        ...

    def accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward pass of a micro-batch; the last one joins the gradients."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar."""
        ...

    def clip_gradient(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale the joined gradient down to an L2 norm; returns the norm before scaling."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every process's value, in rank order."""
        ...


class SingleProcess:
    """A single process with plain torch."""

    num_processes = 1
    rank = 0

    def accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Do nothing, because there is nothing to join."""
        del is_last
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar."""
        torch.autograd.backward(loss)

    def clip_gradient(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale the gradient down to an L2 norm; returns the norm before scaling."""
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def gather(self, value: T) -> list[T]:
        """The value of this process."""
        return [value]


SINGLE_PROCESS = SingleProcess()
