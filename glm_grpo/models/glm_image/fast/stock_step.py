"""The stock forward pass as a token step, and the choice of the fastest step that equals it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import DynamicCache
from typing_extensions import override

from glm_grpo.models.capture import captures
from glm_grpo.models.glm_image.fast.captured_step import CapturedStep
from glm_grpo.models.glm_image.fast.token_step import GlmImagePrompts, TokenStep
from glm_grpo.models.glm_image.network import GlmImageNetwork
from glm_grpo.models.token_step import Finish, Step, StepBuilder, choose_equal_step

_CHECKED_PROMPTS = 2
"""Prompts to compare; of two, one is usually padded, and their second cache stays small."""


class StockStep(Step):
    """The model's own forward pass, one token of every sample at a time.

    Slower than `TokenStep`, but works with any layers. Arguments as there.
    """

    def __init__(self, network: GlmImageNetwork, prompts: GlmImagePrompts, group_size: int) -> None:
        self._model = network.language_model
        self._cache = DynamicCache()
        for index, layer in enumerate(prompts.cache.layers):
            keys, values = (
                each.repeat_interleave(group_size, dim=0) for each in (layer.keys, layer.values)
            )
            self._cache.update(keys, values, index)
        device = prompts.states.device
        self._mask = prompts.mask.repeat_interleave(group_size, dim=0).to(device)
        self._positions = prompts.positions.repeat_interleave(group_size, dim=1).to(device)
        self._written = 0

    @override
    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        at = slice(self._written, self._written + 1)
        self._written += 1
        read = self._model(
            input_ids=token_ids.unsqueeze(1),
            attention_mask=self._mask,
            position_ids=self._positions[..., at],
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: Tensor = read.last_hidden_state[:, -1]
        return hidden


def choose_step(
    network: GlmImageNetwork,
    prompts: GlmImagePrompts,
    finish: Finish[Any],
    *,
    is_compiling: bool = False,
) -> StepBuilder:
    """Choose a step by a few of the prompts, see `choose_equal_step`.

    Args:
        is_compiling: Whether to try a compiled step on a CUDA device.
    """
    fast: dict[str, StepBuilder] = {"token step": TokenStep}
    if captures(prompts.states.device):
        fast = {"captured token step": CapturedStep, **fast}
        if is_compiling:
            fast = {"compiled token step": partial(CapturedStep, is_compiled=True), **fast}
    return choose_equal_step(fast, StockStep, network, _first(prompts, _CHECKED_PROMPTS), finish)


def _first(prompts: GlmImagePrompts, count: int) -> GlmImagePrompts:
    read = DynamicCache()
    for index, layer in enumerate(prompts.cache.layers):
        read.update(layer.keys[:count], layer.values[:count], index)
    return replace(
        prompts,
        states=prompts.states[:count],
        num_prompts=min(count, prompts.num_prompts),
        cache=read,
        mask=prompts.mask[:count],
        positions=prompts.positions[:, :count],
    )
