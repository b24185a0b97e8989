"""Work on an accelerator as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def captures(device: torch.device) -> bool:
    """Whether a device runs CUDA graphs."""
    return device.type == "cuda"


class CapturedWork:
    """Work on tensors that runs at the first call, is captured at the second, and then replayed."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self._inputs: tuple[Tensor, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Do the work on these inputs, which always have the same shapes."""
        stream = _capture_stream(inputs[0].device)
        if self._inputs is None:
            self._inputs = tuple(each.clone() for each in inputs)
            # Libraries allocate memory and choose kernels at first, which cannot be captured.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs = self._work(*self._inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return tree_map_only(Tensor, Tensor.clone, outputs)
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Reward terms may use the accelerator in other threads meanwhile.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._outputs = self._work(*self._inputs)
        self._graph.replay()
        return tree_map_only(Tensor, Tensor.clone, self._outputs)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """A single stream, because libraries keep memory for every stream they have worked on."""
    return torch.cuda.Stream(device)
