"""Read one token of every sample: eagerly, or as a CUDA graph that launches all kernels at once.

Both run the stock layers. The graph repeats the same operations on the same memory, so it attends
to room for more tokens than there are, and masks what is not written yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from typing_extensions import override

from glm_grpo.models.capture import captures
from glm_grpo.models.janus_pro.network import JanusNetwork
from glm_grpo.models.token_step import (
    Captured,
    Finish,
    FixedShapes,
    ReadPrompts,
    Step,
    StepBuilder,
    choose_equal_step,
)

_WIDTHS = 4
"""Graphs of a rollout, each for a quarter of the tokens: fewer read more memory that is masked, and
more take longer to capture."""


@dataclass(frozen=True)
class JanusPrompts(ReadPrompts):
    """See `ReadPrompts`; with guidance there are two rows of each prompt.

    Attributes:
        caches: Keys and values, in parts of the rows.
        mask: 1 on tokens; None if there is no padding.
    """

    caches: Sequence[Cache]
    mask: Int64[Tensor, "R L"] | None


class TokenStep(Step):
    """The stock layers, one token of every sample at a time.

    Args:
        group_size: G, samples of each row.
    """

    def __init__(self, network: JanusNetwork, prompts: JanusPrompts, group_size: int) -> None:
        self._network = network
        self._cache = DynamicCache()
        parts = zip(*(cache.layers for cache in prompts.caches), strict=True)
        self._layers = [FilledLayer(each, group_size, prompts.num_tokens - 1) for each in parts]
        self._cache.layers = [*self._layers]
        mask = prompts.mask
        self._mask = None if mask is None else mask.repeat_interleave(group_size, dim=0)

    @override
    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        position_ids = None
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
            position_ids = self._mask.sum(dim=1, keepdim=True) - 1
        return self._read(token_ids, self._mask, position_ids)

    def _read(
        self, token_ids: Int64[Tensor, " N"], mask: Tensor | None, position_ids: Tensor | None
    ) -> Float[Tensor, "R D"]:
        read = self._network.language_model(
            inputs_embeds=self._network.embed_tokens(token_ids.unsqueeze(1)),
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: Tensor = read.last_hidden_state[:, 0]
        return hidden


class FixedShapesStep(FixedShapes, TokenStep):
    """`TokenStep` with the same operations for a quarter of the tokens."""

    def __init__(self, network: JanusNetwork, prompts: JanusPrompts, group_size: int) -> None:
        super().__init__(network, prompts, group_size)
        like = self._layers[0].room
        rows, length = like.shape[0], self._layers[0].written
        mask = torch.ones(rows, length, device=like.device, dtype=torch.long)
        if self._mask is not None:
            mask = self._mask
        self._position_ids = mask.sum(dim=1, keepdim=True)
        # Added to the scores of attention: 0 on what is read.
        bias = torch.full((rows, like.shape[2]), -torch.inf, device=like.device, dtype=like.dtype)
        bias[:, :length].masked_fill_(mask == 1, 0.0)
        self._bias = bias[:, None, None]
        self._at = torch.full((1,), length, device=like.device, dtype=torch.long)
        self._length, self._tokens, self._read_tokens = length, prompts.num_tokens - 1, 0
        for layer in self._layers:
            layer.at = self._at

    def _widen(self) -> int:
        """Let layers show room for the next quarter of the tokens; returns the width."""
        quarter = math.ceil(self._tokens / _WIDTHS)
        quarters = self._read_tokens // quarter + 1
        width = self._length + min(self._tokens, quarters * quarter)
        for layer in self._layers:
            layer.width = width
        self._read_tokens += 1
        return width

    def _read_next(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        self._bias.index_fill_(-1, self._at, 0.0)
        bias = self._bias[..., : self._layers[0].width]
        hidden = self._read(token_ids, bias, self._position_ids)
        self._at += 1
        self._position_ids += 1
        return hidden


class CapturedStep(Captured, FixedShapesStep):
    """`FixedShapesStep` as CUDA graphs, one for each quarter of the tokens."""


def choose_step(network: JanusNetwork, prompts: JanusPrompts, finish: Finish[Any]) -> StepBuilder:
    """Choose the captured step if it equals the eager one, see `choose_equal_step`."""
    fast = {"captured token step": CapturedStep} if captures(prompts.states.device) else {}
    return choose_equal_step(fast, TokenStep, network, prompts, finish)


class FilledLayer(DynamicLayer):
    """Keys and values of one layer, in memory that is allocated once for all tokens.

    The stock layer copies all of them at every token.

    Attributes:
        written: Number of tokens that are written.
        at: Index of the next token on the device; None: `written`.
        width: With `at`, the number of tokens that attention reads.

    Args:
        prompts: The stock layer's, in parts of the rows.
        group_size: Samples of each row.
        tokens: Tokens that will be added to each.
    """

    def __init__(self, prompts: tuple[Any, ...], group_size: int, tokens: int) -> None:
        super().__init__()
        self.room, self._values = (
            _with_room([getattr(part, name) for part in prompts], group_size, tokens)
            for name in ("keys", "values")
        )
        self.written = self.width = prompts[0].keys.shape[-2]
        self.at: Tensor | None = None
        self.dtype, self.device = self.room.dtype, self.room.device
        self.is_initialized = True
        self._show(self.written)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `DynamicLayer`; one token of each row."""
        if self.at is not None:
            self.room.index_copy_(2, self.at, key_states)
            self._values.index_copy_(2, self.at, value_states)
            return self._show(self.width)
        self.room[:, :, self.written] = key_states[:, :, 0]
        self._values[:, :, self.written] = value_states[:, :, 0]
        self.written += 1
        return self._show(self.written)

    def _show(self, width: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.room[:, :, :width], self._values[:, :, :width]
        return self.keys, self.values


def _with_room(parts: list[Tensor], group_size: int, tokens: int) -> Tensor:
    """Keys or values of all rows, repeated for each sample, with room for more tokens."""
    rows, (_, heads, length, size) = sum(map(len, parts)), parts[0].shape
    # Zeros, because masked entries are still multiplied by a weight of 0.
    room = parts[0].new_zeros(rows * group_size, heads, length + tokens, size)
    start = 0
    for part in parts:
        stop = start + len(part) * group_size
        # Sample by sample, without a repeated copy.
        room[start:stop].unflatten(0, (len(part), group_size))[..., :length, :] = part[:, None]
        start = stop
    return room
