"""One token of every sample: the language model's forward pass without its bookkeeping.

The model's own forward makes masks, positions and growing caches anew for every token. Here they
are made once, and a prompt's keys and values are kept and read once for all samples of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import GlmImageTextModel
from transformers.cache_utils import Cache

from glm_grpo.glm_image.prompt_inputs import PromptInputs


@dataclass(frozen=True)
class _Layer:
    """A decoder layer with its cache; K key/value heads of size d, L prompt tokens, T generated."""

    module: Any
    project: Mapping[str, Callable[[Tensor], Tensor]]
    prompt_keys: Float[Tensor, "P K d L"]
    prompt_values: Float[Tensor, "P K L d"]
    keys: Float[Tensor, "N K T d"]
    values: Float[Tensor, "N K T d"]


class TokenStep:
    """Goes on from prefilled prompts, a token of every sample at a time.

    Row i belongs to prompt i // group_size. Hidden states equal those of the model's own forward
    pass to rounding.

    Args:
        language_model: GLM-Image's, with or without adapters.
        inputs: P prompts.
        cache: What the model's forward pass over the prompts has filled.
        group_size: G, samples of each prompt.
        positions: Of the generated tokens, T for each prompt.
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
        self._model = language_model
        self._group_size = group_size
        self._written = 0
        keys = [layer.keys for layer in cache.layers]
        num_tokens = positions.shape[-1]
        self._layers = tuple(
            _Layer(
                module=module,
                project=_projections(module),
                prompt_keys=layer.keys.transpose(2, 3),
                prompt_values=layer.values,
                keys=_room(layer.keys, group_size, num_tokens),
                values=_room(layer.values, group_size, num_tokens),
            )
            for module, layer in zip(language_model.layers, cache.layers, strict=True)
        )
        cos, sin = language_model.rotary_emb(keys[0], positions.to(keys[0].device))
        self._cos, self._sin = (
            table.transpose(0, 1).repeat_interleave(group_size, dim=1).unsqueeze(2).contiguous()
            for table in (cos, sin)
        )
        # Rotating by halves is a roll once the sign stands in the sine.
        self._sin[..., : sin.shape[-1] // 2].neg_()
        is_padded = inputs.attention_mask == 0
        bias = torch.zeros(is_padded.shape).masked_fill_(is_padded, -torch.inf)
        self._padding = bias[:, None, None].to(keys[0]) if is_padded.any() else None

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """Takes the next token of every sample; the hidden state that predicts the one after it."""
        hidden = self._model.embed_tokens(token_ids)
        for layer in self._layers:
            module = layer.module
            attended = self._attend(layer, _norm(module.input_layernorm, hidden))
            hidden = hidden + _norm(module.post_self_attn_layernorm, attended)
            normed = _norm(module.post_attention_layernorm, hidden)
            gate, up = layer.project["gate_up_proj"](normed).chunk(2, dim=-1)
            changed = layer.project["down_proj"](module.mlp.activation_fn(gate) * up)
            hidden = hidden + _norm(module.post_mlp_layernorm, changed)
        self._written += 1
        return _norm(self._model.norm, hidden)

    def _attend(self, layer: _Layer, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        attention, project, at = layer.module.self_attn, layer.project, self._written
        rows, size = len(hidden), attention.head_dim
        queries = self._rotate(project["q_proj"](hidden).view(rows, -1, size))
        layer.keys[:, :, at] = self._rotate(project["k_proj"](hidden).view(rows, -1, size))
        layer.values[:, :, at] = project["v_proj"](hidden).view(rows, -1, size)
        queries = (queries * attention.scaling).view(rows, layer.keys.shape[1], -1, size)
        to_prompt = self._by_prompt(queries) @ layer.prompt_keys
        if self._padding is not None:
            to_prompt = to_prompt + self._padding
        to_generated = queries @ layer.keys[:, :, : at + 1].transpose(2, 3)
        scores = torch.cat([self._by_sample(to_prompt), to_generated], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(hidden.dtype)
        on_prompt, on_generated = weights.split([to_prompt.shape[-1], at + 1], dim=-1)
        values = on_generated @ layer.values[:, :, : at + 1]
        values = values + self._by_sample(self._by_prompt(on_prompt) @ layer.prompt_values)
        return project["o_proj"](values.reshape(rows, -1))

    def _rotate(self, states: Float[Tensor, "N heads d"]) -> Float[Tensor, "N heads d"]:
        cos, sin = self._cos[self._written], self._sin[self._written]
        turned, kept = states.split([cos.shape[-1], states.shape[-1] - cos.shape[-1]], dim=-1)
        turned = turned * cos + turned.roll(cos.shape[-1] // 2, dims=-1) * sin
        return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned

    def _by_prompt(self, states: Float[Tensor, "N K R s"]) -> Float[Tensor, "P K GR s"]:
        """Samples of a prompt side by side, so that its keys and values are read once."""
        return states.unflatten(0, (-1, self._group_size)).transpose(1, 2).flatten(2, 3)

    def _by_sample(self, states: Float[Tensor, "P K GR s"]) -> Float[Tensor, "N K R s"]:
        return states.unflatten(2, (self._group_size, -1)).transpose(1, 2).flatten(0, 1)


def _room(states: Float[Tensor, "P K L d"], group_size: int, num_tokens: int) -> Tensor:
    prompts, heads, _, size = states.shape
    return states.new_empty(prompts * group_size, heads, num_tokens, size)


def _projections(layer: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """The linear maps of a decoder layer by name."""
    parts = (
        (layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
        (layer.mlp, ("gate_up_proj", "down_proj")),
    )
    modules = {name: getattr(part, name) for part, names in parts for name in names}
    return {
        # A plain one is called without the machinery of modules, which takes as long as its product
        # for a few rows; adapters and quantised weights have a forward of their own.
        name: partial(nn.functional.linear, weight=module.weight, bias=module.bias)
        if type(module) is nn.Linear
        else module
        for name, module in modules.items()
    }


def _norm(module: Any, states: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """The model's root-mean-square norm, in one operation where rounding allows it."""
    if states.dtype != torch.float32:
        # The model rounds before it multiplies by the weight, and replay does so too.
        normed: Tensor = module(states)
        return normed
    return nn.functional.rms_norm(states, states.shape[-1:], module.weight, module.variance_epsilon)
