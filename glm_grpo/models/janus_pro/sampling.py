"""Sample token grids under guidance, and record the log-probability of every token.

Each prompt is read once, with and without its text; its G samples continue both rows.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from glm_grpo.models.drawing import Drawn, Truncation, draw_tokens, draw_uniforms, join_drawn
from glm_grpo.models.janus_pro.network import JanusNetwork, positions
from glm_grpo.models.janus_pro.prompt_inputs import PromptInputs
from glm_grpo.models.memory import PREFILLED_AT_ONCE
from glm_grpo.types import Count, PromptBatch, Rollout, not_counted


def sample_rollout(
    network: JanusNetwork,
    inputs: PromptInputs,
    batch: PromptBatch,
    *,
    num_tokens: int,
    truncation: Truncation,
    phase: str = "rollout",
    count: Count = not_counted,
) -> Rollout:
    """Sample G token grids for each prompt.

    Random numbers are those of `glm_grpo.models.drawing`.

    Args:
        network: In evaluation mode.
        inputs: The prompts; with guidance also those without text, see `with_unconditional`.
        num_tokens: T.
        truncation: Log-probs are those after truncation.
        phase: Phase of the run, for errors.
        count: Called after each token.

    Raises:
        NonFiniteError: A log-probability is not finite; the message names phase, prompt, sample
            and token.
    """
    # Cheaper than `no_grad`; autograd cannot use its tensors, so copies are returned.
    with torch.inference_mode():
        sampled = _sample_grids(network, inputs, batch, num_tokens, truncation, count)
    return join_drawn(sampled, batch, phase)


def _sample_grids(
    network: JanusNetwork,
    inputs: PromptInputs,
    batch: PromptBatch,
    num_tokens: int,
    truncation: Truncation,
    count: Count,
) -> list[Drawn]:
    group, device = batch.group_size, network.generation_head.vision_head.weight.device
    mask = None if inputs.attention_mask.all() else inputs.attention_mask.to(device)
    last_hidden, caches = _prefill(network, inputs.input_ids.to(device), mask)
    states = last_hidden.repeat_interleave(group, dim=0)
    step = _TokenStep(network, caches, mask, group_size=group, num_tokens=num_tokens)
    # Copied for every sample.
    del caches
    uniforms = draw_uniforms(batch, num_tokens).to(device)
    sampled: list[Drawn] = []
    for index in range(num_tokens):
        if index > 0:
            states = step(sampled[-1].token_ids)
        drawn = draw_tokens(network.logits(states), truncation, uniforms[:, index])
        if drawn.sampling_mask is not None:
            drawn = drawn._replace(sampling_mask=drawn.sampling_mask.cpu())
        sampled.append(drawn)
        count(index + 1, num_tokens)
    return sampled


def _prefill(
    network: JanusNetwork, input_ids: Int64[Tensor, "R L"], mask: Int64[Tensor, "R L"] | None
) -> tuple[Float[Tensor, "R D"], list[Cache]]:
    """Read prompts in chunks: the last state of each row, and the cache of each chunk."""
    states, caches = [], []
    for start in range(0, len(input_ids), PREFILLED_AT_ONCE):
        rows = slice(start, start + PREFILLED_AT_ONCE)
        caches.append(DynamicCache())
        read = network.language_model(
            input_ids=input_ids[rows],
            attention_mask=None if mask is None else mask[rows],
            position_ids=None if mask is None else positions(mask[rows]),
            past_key_values=caches[-1],
            use_cache=True,
        )
        states.append(read.last_hidden_state[:, -1])
    return torch.cat(states), caches


class _TokenStep:
    """Reads one token of every sample.

    Args:
        caches: Keys and values of the prompts, in parts.
        mask: 1 on the prompts' tokens; None if there is no padding.
    """

    def __init__(
        self,
        network: JanusNetwork,
        caches: list[Cache],
        mask: Int64[Tensor, "R L"] | None,
        *,
        group_size: int,
        num_tokens: int,
    ) -> None:
        self._network = network
        self._cache = DynamicCache()
        layers = zip(*(cache.layers for cache in caches), strict=True)
        # The last token is drawn, but not read.
        self._cache.layers = [_FilledLayer(each, group_size, num_tokens - 1) for each in layers]
        self._mask = None if mask is None else mask.repeat_interleave(group_size, dim=0)

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        """Read one token of each sample; returns the state of every row."""
        place = None
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
            place = self._mask.sum(dim=1, keepdim=True) - 1
        read = self._network.language_model(
            inputs_embeds=self._network.embed_tokens(token_ids.unsqueeze(1)),
            attention_mask=self._mask,
            position_ids=place,
            past_key_values=self._cache,
            use_cache=True,
        )
        return read.last_hidden_state[:, 0]


class _FilledLayer(DynamicLayer):
    """Keys and values of one layer, in memory that is allocated once for all tokens.

    The stock layer copies all of them at every token.

    Args:
        prompts: The stock layer's, in parts of the rows.
        group_size: Samples of each row.
        tokens: Tokens that will be added to each.
    """

    def __init__(self, prompts: tuple[Any, ...], group_size: int, tokens: int) -> None:
        super().__init__()
        self._keys, self._values = (
            _with_room([getattr(part, name) for part in prompts], group_size, tokens)
            for name in ("keys", "values")
        )
        self._written = prompts[0].keys.shape[-2]
        self.dtype, self.device = self._keys.dtype, self._keys.device
        self.is_initialized = True
        self._show()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `DynamicLayer`."""
        place = slice(self._written, self._written + key_states.shape[-2])
        self._keys[:, :, place], self._values[:, :, place] = key_states, value_states
        self._written = place.stop
        return self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        self.keys = self._keys[:, :, : self._written]
        self.values = self._values[:, :, : self._written]
        return self.keys, self.values


def _with_room(parts: list[Tensor], group_size: int, tokens: int) -> Tensor:
    """Keys or values of all rows, repeated for each sample, with room for more tokens."""
    rows, (_, heads, length, size) = sum(map(len, parts)), parts[0].shape
    room = parts[0].new_empty(rows * group_size, heads, length + tokens, size)
    start = 0
    for part in parts:
        stop = start + len(part) * group_size
        # Sample by sample, without a repeated copy.
        room[start:stop].unflatten(0, (len(part), group_size))[..., :length, :] = part[:, None]
        start = stop
    return room
