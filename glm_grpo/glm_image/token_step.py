"""One token of every sample: the language model's forward pass without its bookkeeping.

The model's own forward makes masks, positions and growing caches anew for every token. Here they
are made once, and a prompt's keys and values are kept and read once for all samples of its group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Float32, Int64
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import GlmImageTextModel
from transformers.cache_utils import Cache

from glm_grpo.glm_image.prompt_inputs import PromptInputs

_LARGEST_BLOCK = 64
"""Tokens whose keys lie side by side in CPU memory. What a token step reads is then without gaps up
to the block that is being filled; with room for all tokens left in every row it took twice as long.
"""
_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


@dataclass(frozen=True)
class _Layer:
    """A decoder layer with its cache.

    K key/value heads of size d; L prompt tokens; generated ones in C blocks of B.
    """

    module: Any
    project: Mapping[str, Callable[[Tensor], Tensor]]
    norm: Mapping[str, Callable[[Tensor], Tensor]]
    prompt_keys: Float[Tensor, "P K d L"]
    prompt_values: Float[Tensor, "P K L d"]
    keys: Float[Tensor, "C N K B d"]
    values: Float[Tensor, "C N K B d"]


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
        # Blocks are measured on the CPU only, and each is a product more to be added up.
        num_blocks = math.ceil(num_tokens / _LARGEST_BLOCK) if keys[0].device.type == "cpu" else 1
        self._block_size = math.ceil(num_tokens / num_blocks)
        rows = keys[0].shape[0] * group_size
        room = (num_blocks, rows, keys[0].shape[1], self._block_size, keys[0].shape[3])
        self._layers = tuple(
            _Layer(
                module=module,
                project=_projections(module),
                norm={name: _norm(getattr(module, name)) for name in _NORMS},
                prompt_keys=layer.keys.transpose(2, 3),
                prompt_values=layer.values,
                keys=layer.keys.new_zeros(room),
                values=layer.values.new_zeros(room),
            )
            for module, layer in zip(language_model.layers, cache.layers, strict=True)
        )
        cos, sin = language_model.rotary_emb(keys[0], positions.to(keys[0].device))
        self._cos, self._sin = (
            table.transpose(0, 1).repeat_interleave(group_size, dim=1).unsqueeze(2).contiguous()
            for table in (cos, sin)
        )
        # Rotating by halves is a swap of them once the sign stands in the sine.
        self._sin[..., : sin.shape[-1] // 2].neg_()
        is_padded = inputs.attention_mask == 0
        bias = torch.zeros(is_padded.shape).masked_fill_(is_padded, -torch.inf)
        self._norm = _norm(language_model.norm)
        self._padding = bias[:, None, None].to(keys[0]) if is_padded.any() else None

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """Takes the next token of every sample; the hidden state that predicts the one after it."""
        hidden = self._model.embed_tokens(token_ids)
        for layer in self._layers:
            attended = self._attend(layer, layer.norm["input_layernorm"](hidden))
            hidden = hidden + layer.norm["post_self_attn_layernorm"](attended)
            normed = layer.norm["post_attention_layernorm"](hidden)
            gate, up = layer.project["gate_up_proj"](normed).chunk(2, dim=-1)
            changed = layer.project["down_proj"](layer.module.mlp.activation_fn(gate) * up)
            hidden = hidden + layer.norm["post_mlp_layernorm"](changed)
        self._written += 1
        return self._norm(hidden)

    def _attend(self, layer: _Layer, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        attention, project = layer.module.self_attn, layer.project
        rows, size, heads = len(hidden), attention.head_dim, layer.keys.shape[2]
        block, at = divmod(self._written, self._block_size)
        unrotated = torch.cat([project["q_proj"](hidden), project["k_proj"](hidden)], dim=-1)
        rotated = self._rotate(unrotated.view(rows, -1, size))
        layer.keys[block, :, :, at] = rotated[:, -heads:]
        layer.values[block, :, :, at] = project["v_proj"](hidden).view(rows, heads, size)
        queries = (rotated[:, :-heads] * attention.scaling).view(rows, heads, -1, size)
        to_prompt = self._by_prompt(queries) @ layer.prompt_keys
        if self._padding is not None:
            to_prompt = to_prompt + self._padding
        width = self._block_size if block else at + 1
        to_blocks = queries @ layer.keys[: block + 1, :, :, :width].transpose(3, 4)
        weights = self._weigh(to_prompt, to_blocks).to(hidden.dtype)
        on_prompt, on_generated = weights.tensor_split([to_prompt.shape[-1]], dim=-1)
        on_blocks = on_generated.unflatten(-1, (-1, width)).permute(3, 0, 1, 2, 4)
        of_blocks = on_blocks @ layer.values[: block + 1, :, :, :width]
        values = of_blocks.sum(dim=0) if block else of_blocks[0]
        values = values + self._by_sample(self._by_prompt(on_prompt) @ layer.prompt_values)
        return project["o_proj"](values.reshape(rows, -1))

    def _weigh(
        self, to_prompt: Float[Tensor, "P K GR L"], to_blocks: Float[Tensor, "C N K R B"]
    ) -> Float32[Tensor, "N K R S"]:
        """Softmax over prompt and generated tokens, side by side; 0 on what is not written yet."""
        blocks, *shape, width = to_blocks.shape
        prompt = to_prompt.shape[-1]
        scores = to_blocks.new_empty(*shape, prompt + blocks * width)
        by_sample = to_prompt.unflatten(2, (self._group_size, -1)).transpose(1, 2)
        scores[..., :prompt].unflatten(0, (-1, self._group_size)).copy_(by_sample)
        scores[..., prompt:].unflatten(-1, (blocks, -1)).copy_(to_blocks.permute(1, 2, 3, 0, 4))
        scores[..., prompt + self._written + 1 :] = -torch.inf
        return scores.softmax(dim=-1, dtype=torch.float32)

    def _rotate(self, states: Float[Tensor, "N heads d"]) -> Float[Tensor, "N heads d"]:
        cos, sin = self._cos[self._written], self._sin[self._written]
        turned, kept = states, None
        if cos.shape[-1] < states.shape[-1]:
            turned, kept = states.tensor_split([cos.shape[-1]], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([second, first], dim=-1) * sin
        return turned if kept is None else torch.cat([turned, kept], dim=-1)

    def _by_prompt(self, states: Float[Tensor, "N K R s"]) -> Float[Tensor, "P K GR s"]:
        """Samples of a prompt side by side, so that its keys and values are read once."""
        return states.unflatten(0, (-1, self._group_size)).transpose(1, 2).flatten(2, 3)

    def _by_sample(self, states: Float[Tensor, "P K GR s"]) -> Float[Tensor, "N K R s"]:
        return states.unflatten(2, (self._group_size, -1)).transpose(1, 2).flatten(0, 1)


def _projections(layer: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """The linear maps of a decoder layer by name."""
    parts = (
        (layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
        (layer.mlp, ("gate_up_proj", "down_proj")),
    )
    return {
        name: _without_machinery(getattr(part, name)) for part, names in parts for name in names
    }


def _without_machinery(module: Any) -> Callable[[Tensor], Tensor]:
    """The same operations without that of modules, which takes as long as a product of few rows.

    Quantised weights have a forward of their own.
    """
    if type(module) is nn.Linear:
        return partial(nn.functional.linear, weight=module.weight, bias=module.bias)
    is_plain_adapter = type(module) is LoraLinear and not (module.merged or module.lora_variant)
    if not is_plain_adapter or len(module.active_adapters) != 1:
        return cast("Callable[[Tensor], Tensor]", module)
    base = _without_machinery(module.base_layer)
    if module.disable_adapters:
        return base
    (name,) = module.active_adapters
    return partial(
        _adapted,
        base=base,
        down=_without_machinery(module.lora_A[name]),
        up=_without_machinery(module.lora_B[name]),
        dtype=module.lora_A[name].weight.dtype,
        scaling=module.scaling[name],
    )


def _adapted(
    states: Tensor,
    *,
    base: Callable[[Tensor], Tensor],
    down: Callable[[Tensor], Tensor],
    up: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    scaling: float,
) -> Tensor:
    """What peft computes, in its order."""
    result = base(states)
    return (result + up(down(states.to(dtype))) * scaling).to(result.dtype)


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    """The model's root-mean-square norm, in few operations where rounding allows it."""
    weight = module.weight
    if weight.dtype != torch.float32:
        # The model rounds before it multiplies by the weight, and replay does so too.
        return cast("Callable[[Tensor], Tensor]", module)
    size = len(weight)
    floor = weight.new_tensor(math.sqrt(size * module.variance_epsilon))
    return partial(_normalise, weight=weight * math.sqrt(size), floor=floor)


def _normalise(states: Tensor, *, weight: Tensor, floor: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return (states / torch.hypot(length, floor)).mul_(weight)
