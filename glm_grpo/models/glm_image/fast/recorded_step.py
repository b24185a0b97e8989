"""The token step as a CUDA graph: recorded once, replayed for every token.

Launching its thousands of small operations one by one takes longer than running them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import GlmImageTextModel
from transformers.cache_utils import Cache

from glm_grpo.models.glm_image.fast.token_step import Finish, Position, TokenStep
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs

_Finished = TypeVar("_Finished")


class FixedShapesStep(TokenStep):
    """Reads every token with the same operations on the same memory; arguments as in `TokenStep`.

    Memory for all tokens is allocated at the start, unwritten tokens are masked, and the index of
    the current token is kept on the device.
    """

    def __init__(
        self,
        language_model: GlmImageTextModel,
        inputs: PromptInputs,
        cache: Cache,
        *,
        group_size: int,
        positions: Int64[Tensor, "3 P T"],
        is_compiled: bool = False,
    ) -> None:
        super().__init__(
            language_model,
            inputs,
            cache,
            group_size=group_size,
            positions=positions,
            is_compiled=is_compiled,
        )
        num_tokens = positions.shape[-1]
        for layer in self._layers:
            layer.grow(num_tokens)
        self._unwritten = self._unwritten[..., :num_tokens]
        self._at = torch.zeros(1, dtype=torch.long, device=self._cos.device)

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """See `TokenStep`."""
        self._unwritten.index_fill_(-1, self._at, 0.0)
        cos, sin = (table.index_select(0, self._at)[0] for table in (self._cos, self._sin))
        position = Position(self._at, (cos, sin), self._unwritten.shape[-1], has_unwritten=True)
        hidden = self._read(token_ids, position)
        self._at += 1
        return hidden


class RecordedStep(FixedShapesStep):
    """`FixedShapesStep` as a CUDA graph, which may include the work on its hidden states.

    Arguments as in `TokenStep`.
    """

    _recorded: _Recording | None = None

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """See `TokenStep`."""
        if self._recorded is None:
            self._recorded = _Recording(super().__call__)
        hidden: Tensor = self._recorded(token_ids)
        return hidden

    def then(self, finish: Finish[_Finished]) -> Callable[[Tensor, Tensor], _Finished]:
        """See `Step`."""
        read = super().__call__
        return _Recording(lambda token_ids, uniforms: finish(read(token_ids), uniforms))


class _Recording:
    """Work on tensors that runs at the first call, is recorded at the second, and then replayed."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self._inputs: tuple[Tensor, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        stream = _recording_stream(inputs[0].device)
        if self._inputs is None:
            self._inputs = tuple(each.clone() for each in inputs)
            # Libraries allocate memory and choose kernels at first, which cannot be recorded.
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
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """A single stream, because libraries keep memory for every stream they have worked on."""
    return torch.cuda.Stream(device)
