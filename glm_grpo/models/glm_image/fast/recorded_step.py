"""The token step as a CUDA graph: recorded once, replayed for every token.

To launch its thousands of small operations one by one takes longer than to do them.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import GlmImageTextModel
from transformers.cache_utils import Cache

from glm_grpo.models.glm_image.fast.token_step import Place, TokenStep
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs


class FixedShapesStep(TokenStep):
    """Reads every token by the same operations on the same memory.

    There is room for all tokens from the start, those to come are masked, and where a token stands
    is known on the device alone. Arguments as those of `TokenStep`.
    """

    def __init__(
        self,
        language_model: GlmImageTextModel,
        inputs: PromptInputs,
        cache: Cache,
        *,
        group_size: int,
        positions: Int64[Tensor, "3 P T"],
    ) -> None:
        super().__init__(language_model, inputs, cache, group_size=group_size, positions=positions)
        num_tokens = positions.shape[-1]
        for layer in self._layers:
            layer.grow(num_tokens)
        self._unwritten = self._unwritten[..., :num_tokens]
        self._at = torch.zeros(1, dtype=torch.long, device=self._cos.device)

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """See `TokenStep`."""
        self._unwritten.index_fill_(-1, self._at, 0.0)
        cos, sin = (table.index_select(0, self._at)[0] for table in (self._cos, self._sin))
        place = Place(self._at, (cos, sin), self._unwritten.shape[-1], has_unwritten=True)
        hidden = self._read(token_ids, place)
        self._at += 1
        return hidden


class RecordedStep(FixedShapesStep):
    """`FixedShapesStep` as a CUDA graph: recorded at the second token, replayed from then on.

    Arguments as those of `TokenStep`.
    """

    _token_ids: Tensor | None = None
    """What the graph reads."""
    _graph: torch.cuda.CUDAGraph | None = None
    _hidden: Tensor
    """What the graph writes."""

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """See `TokenStep`."""
        stream = _recording_stream(token_ids.device)
        if self._token_ids is None:
            self._token_ids = token_ids.clone()
            # Libraries take memory and choose kernels at a first call, which cannot be recorded.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                hidden = super().__call__(self._token_ids)
            torch.cuda.current_stream().wait_stream(stream)
            return hidden.clone()
        self._token_ids.copy_(token_ids)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Reward terms may work on the accelerator meanwhile, in threads of their own.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._hidden = super().__call__(self._token_ids)
        self._graph.replay()
        return self._hidden.clone()


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: libraries keep memory for every stream that they have worked on."""
    return torch.cuda.Stream(device)
