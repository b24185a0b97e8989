"""The token step as a CUDA graph: recorded once, replayed for every token.

Launching its thousands of small operations one by one takes longer than running them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import GlmImageTextModel
from transformers.cache_utils import Cache

from glm_grpo.models.glm_image.fast.token_step import Finish, Position, TokenStep
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs
from glm_grpo.models.recording import Recording

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

    _recorded: Recording | None = None

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """See `TokenStep`."""
        if self._recorded is None:
            self._recorded = Recording(super().__call__)
        hidden: Tensor = self._recorded(token_ids)
        return hidden

    def then(self, finish: Finish[_Finished]) -> Callable[[Tensor, Tensor], _Finished]:
        """See `Step`."""
        read = super().__call__
        return Recording(lambda token_ids, uniforms: finish(read(token_ids), uniforms))
