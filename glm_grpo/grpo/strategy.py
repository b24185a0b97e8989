"""Strategy that joins the processes of a run: the protocol, and the case of one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Strategy(Protocol):
    """Joins the gradients and figures of the processes that train one policy together.

    Each of them replays its own sequences; gradients are averaged over the processes.
    """

    @property
    def num_processes(self) -> int:
        """How many there are."""
        ...

    @property
    def rank(self) -> int:
        """The place of this one among them, from 0."""
        ...

    def accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward pass of a micro-batch; gradients are joined by the last."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar."""
        ...

    def clip_gradient(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale the joined gradient down to an L2 norm; returns the norm before that."""
        ...

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every process's values, in the order of processes."""
        ...


class SingleProcess:
    """Plain torch."""

    num_processes = 1
    rank = 0

    def accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """There is nothing to join."""
        del is_last
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar."""
        torch.autograd.backward(loss)

    def clip_gradient(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale the gradient down to an L2 norm; returns the norm before that."""
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Those of this process."""
        return [list(values)]


SINGLE_PROCESS = SingleProcess()
