"""Read prompts before their token grids are sampled under guidance.

Each prompt is read once, with and without its text; its G samples continue both rows.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import DynamicCache

from glm_grpo.models.janus_pro.network import JanusNetwork, positions
from glm_grpo.models.janus_pro.prompt_inputs import PromptInputs
from glm_grpo.models.janus_pro.token_step import JanusPrompts
from glm_grpo.models.sampling import prefill


def read_prompts(network: JanusNetwork, inputs: PromptInputs, num_tokens: int) -> JanusPrompts:
    """Read prompts on the network's device.

    Args:
        inputs: The prompts; with guidance also those without text, see `with_unconditional`.
        num_tokens: T.
    """
    device = network.head.weight.device
    input_ids = inputs.input_ids.to(device)
    mask = None if inputs.attention_mask.all() else inputs.attention_mask.to(device)

    def read(rows: slice, cache: DynamicCache) -> Tensor:
        states: Tensor = network.language_model(
            input_ids=input_ids[rows],
            attention_mask=None if mask is None else mask[rows],
            position_ids=None if mask is None else positions(mask[rows]),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return states

    states, caches = prefill(read, len(input_ids))
    num_prompts = len(input_ids) // (1 + network.is_guided)
    return JanusPrompts(states, num_prompts, num_tokens, caches=caches, mask=mask)
