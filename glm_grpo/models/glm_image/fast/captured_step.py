"""The token step as a CUDA graph: captured once, replayed for every token."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from glm_grpo.models.glm_image.fast.token_step import GlmImagePrompts, Position, TokenStep
from glm_grpo.models.glm_image.network import GlmImageNetwork
from glm_grpo.models.token_step import Captured, FixedShapes


class FixedShapesStep(FixedShapes, TokenStep):
    """`TokenStep` with memory for all tokens from the start; unwritten ones are masked."""

    def __init__(
        self,
        network: GlmImageNetwork,
        prompts: GlmImagePrompts,
        group_size: int,
        *,
        is_compiled: bool = False,
    ) -> None:
        super().__init__(network, prompts, group_size, is_compiled=is_compiled)
        for layer in self._layers:
            layer.grow(prompts.num_tokens)
        self._unwritten = self._unwritten[..., : prompts.num_tokens]
        self._at = torch.zeros(1, dtype=torch.long, device=self._cos.device)

    def _widen(self) -> int:
        return self._unwritten.shape[-1]

    def _read_next(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        self._unwritten.index_fill_(-1, self._at, 0.0)
        cos, sin = (table.index_select(0, self._at)[0] for table in (self._cos, self._sin))
        position = Position(self._at, (cos, sin), self._unwritten.shape[-1], has_unwritten=True)
        hidden = self._read(token_ids, position)
        self._at += 1
        return hidden


class CapturedStep(Captured, FixedShapesStep):
    """`FixedShapesStep` as a CUDA graph."""
