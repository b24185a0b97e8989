"""Read prompts before their token grids are sampled.

Each distinct prompt is read once; its G samples share the keys and values. Only the codebook can be
drawn, so an image can never end early and every grid is full.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from glm_grpo.models.glm_image.fast.token_step import GlmImagePrompts
from glm_grpo.models.glm_image.network import GlmImageNetwork
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs
from glm_grpo.models.glm_image.token_grid import batch_layout, generated_positions
from glm_grpo.models.sampling import prefill
from glm_grpo.types import PromptBatch


def read_prompts(
    network: GlmImageNetwork, inputs: PromptInputs, batch: PromptBatch
) -> GlmImagePrompts:
    """Read the prompts of a batch on the network's device."""
    device, layout = network.head.weight.device, batch_layout(batch)
    input_ids, position_ids = inputs.input_ids.to(device), inputs.position_ids.to(device)
    mask = inputs.attention_mask.to(device)

    def read(rows: slice, cache: DynamicCache) -> Tensor:
        states: Tensor = network.language_model(
            input_ids=input_ids[rows],
            attention_mask=mask[rows],
            position_ids=position_ids[:, rows],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return states

    states, caches = prefill(read, len(input_ids))
    return GlmImagePrompts(
        states,
        num_prompts=len(input_ids),
        num_tokens=layout.num_tokens,
        cache=_join(caches),
        mask=inputs.attention_mask,
        positions=generated_positions(layout, 0).unsqueeze(1) + inputs.next_position.view(1, -1, 1),
    )


def _join(caches: list[DynamicCache]) -> DynamicCache:
    """The keys and values of all prompts."""
    if len(caches) == 1:
        return caches[0]
    joined = DynamicCache()
    for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        keys, values = (
            torch.cat([getattr(x, name) for x in layers]) for name in ("keys", "values")
        )
        joined.update(keys, values, index)
    return joined
