"""One token of every sample: the language model's forward pass without its bookkeeping.

The model's own forward builds masks, positions and growing caches again for every token. Here they
are built once, or every few dozen tokens, and a prompt's keys and values are stored and read once
for all samples of its group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers.cache_utils import Cache
from typing_extensions import override

from glm_grpo.models.compiling import COMPILING
from glm_grpo.models.glm_image.network import GlmImageNetwork
from glm_grpo.models.lora import AdaptedLinear, add_adapter, half_factors
from glm_grpo.models.token_step import ReadPrompts, Step

_LARGEST_GROWTH = 64
"""Tokens by which keys and values grow in CPU memory. A step reads all allocated rows; reading only
the written ones, with gaps between them, took twice as long."""
_QKV = ("q_proj", "k_proj", "v_proj")
_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


@dataclass(frozen=True)
class GlmImagePrompts(ReadPrompts):
    """See `ReadPrompts`.

    Attributes:
        cache: Keys and values, filled by the model's forward pass.
        mask: 1 on tokens, 0 on padding on the left.
        positions: Positions of the generated tokens.
    """

    cache: Cache
    mask: Int64[Tensor, "P L"]
    positions: Int64[Tensor, "3 P T"]


@dataclass
class _Layer:
    """A decoder layer with its cache.

    P prompts of L tokens, N samples with memory for S tokens; K key/value heads of size d, each
    shared by R queries.
    """

    scaling: float
    size: int
    project_qkv: Callable[[Tensor], list[Tensor]]
    project: Mapping[str, Callable[[Tensor], Tensor]]
    activate: Callable[[Tensor], Tensor]
    norm: Mapping[str, Callable[[Tensor], Tensor]]
    prompt_keys: Float[Tensor, "PK d L"]
    prompt_values: Float[Tensor, "PK L d"]
    keys: Float[Tensor, "NK S d"]
    values: Float[Tensor, "NK S d"]

    def grow(self, tokens: int) -> None:
        """Allocate memory for more tokens, filled with zeros."""
        self.keys = nn.functional.pad(self.keys, (0, 0, 0, tokens))
        self.values = nn.functional.pad(self.values, (0, 0, 0, tokens))

    def write(
        self, at: int | Tensor, *, keys: Float[Tensor, "N K d"], values: Float[Tensor, "N K d"]
    ) -> None:
        """Store keys and values of one token per sample."""
        for room, states in ((self.keys, keys), (self.values, values)):
            rows, heads, size = states.shape
            tokens = room.view(rows, heads, -1, size)
            if isinstance(at, Tensor):
                tokens.index_copy_(2, at, states.unsqueeze(2))
            else:
                tokens.select(2, at).copy_(states)


@dataclass(frozen=True)
class Position:
    """Position of the current tokens among the generated ones.

    Attributes:
        at: Their index; a tensor on the device, with one entry, if the operations must not change.
        turn: Cosine and sine of their rotary position.
        width: Generated tokens that attention reads.
        has_unwritten: Whether some of those are not written yet, and masked.
    """

    at: int | Tensor
    turn: tuple[Float[Tensor, "N 1 r"], Float[Tensor, "N 1 r"]]
    width: int
    has_unwritten: bool


class TokenStep(Step):
    """Continues read prompts, one token of every sample at a time.

    Hidden states equal those of the model's own forward pass to rounding.

    Args:
        group_size: G.
        is_compiled: Whether to compile the parts of a layer before and after attention.
    """

    def __init__(
        self,
        network: GlmImageNetwork,
        prompts: GlmImagePrompts,
        group_size: int,
        *,
        is_compiled: bool = False,
    ) -> None:
        language_model, cache, positions = network.language_model, prompts.cache, prompts.positions
        self._before: Callable[..., Any]
        self._after: Callable[..., Any]
        self._before, self._after = _compiled() if is_compiled else (_before, _after)
        self._group_size = group_size
        self._written = 0
        like = cache.layers[0].keys
        rows, self._heads, _, size = like.shape
        num_tokens = prompts.num_tokens
        # Growing pays on the CPU only, and needs memory for one more layer while that is copied.
        self._is_growing = like.device.type == "cpu"
        num_growths = math.ceil(num_tokens / _LARGEST_GROWTH) if self._is_growing else 1
        self._growth = math.ceil(num_tokens / num_growths)
        empty = (rows * group_size * self._heads, 0, size)
        self._layers = tuple(
            _Layer(
                scaling=module.self_attn.scaling,
                size=module.self_attn.head_dim,
                project_qkv=_side_by_side(_parts(module.self_attn, _QKV), like.dtype),
                project=_projections(module, like.dtype),
                activate=module.mlp.activation_fn,
                norm={name: _norm(getattr(module, name)) for name in _NORMS},
                prompt_keys=layer.keys.flatten(0, 1).transpose(1, 2),
                prompt_values=layer.values.flatten(0, 1),
                keys=like.new_empty(empty),
                values=like.new_empty(empty),
            )
            for module, layer in zip(language_model.layers, cache.layers, strict=True)
        )
        cos, sin = language_model.rotary_emb(like, positions.to(like.device))
        self._cos, self._sin = (
            table.transpose(0, 1).repeat_interleave(group_size, dim=1).unsqueeze(2).contiguous()
            for table in (cos, sin)
        )
        # With the sign in the sine, rotating by halves is a swap of the halves.
        self._sin[..., : sin.shape[-1] // 2].neg_()
        self._embed = partial(nn.functional.embedding, weight=language_model.embed_tokens.weight)
        self._norm = _norm(language_model.norm)
        is_padded = (prompts.mask == 0).repeat_interleave(self._heads, dim=0)
        self._is_padded = bool(is_padded.any())
        padding = torch.zeros(is_padded.shape).masked_fill_(is_padded, -torch.inf)
        self._padding = padding.unsqueeze(1).to(like)
        self._unwritten = like.new_full((1, 1, num_growths * self._growth), -torch.inf)

    @override
    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        if self._written % self._growth == 0:
            for layer in self._layers:
                layer.grow(self._growth)
        self._unwritten[..., self._written] = 0.0
        width = self._layers[0].keys.shape[1] if self._is_growing else self._written + 1
        position = Position(
            self._written,
            (self._cos[self._written], self._sin[self._written]),
            width,
            has_unwritten=width > self._written + 1,
        )
        self._written += 1
        return self._read(token_ids, position)

    def _read(self, token_ids: Int64[Tensor, " N"], position: Position) -> Float[Tensor, "N D"]:
        hidden = self._embed(token_ids)
        for layer in self._layers:
            queries, keys, values = self._before(layer, hidden, *position.turn, self._heads)
            layer.write(position.at, keys=keys, values=values)
            hidden = self._after(layer, hidden, self._attend(layer, queries, position))
        return self._norm(hidden)

    def _attend(
        self, layer: _Layer, queries: Float[Tensor, "NK R d"], position: Position
    ) -> Float[Tensor, "NK R d"]:
        to_prompt = torch.baddbmm(
            self._padding,
            self._by_prompt(queries),
            layer.prompt_keys,
            beta=int(self._is_padded),
            alpha=layer.scaling,
        )
        to_generated = torch.baddbmm(
            self._unwritten[..., : position.width],
            queries,
            layer.keys[:, : position.width].transpose(1, 2),
            beta=int(position.has_unwritten),
            alpha=layer.scaling,
        )
        scores = torch.cat([self._by_sample(to_prompt), to_generated], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype)
        on_prompt, on_generated = weights.tensor_split([to_prompt.shape[-1]], dim=-1)
        mixed = torch.bmm(on_generated, layer.values[:, : position.width])
        mixed += self._by_sample(torch.bmm(self._by_prompt(on_prompt), layer.prompt_values))
        return mixed

    def _by_prompt(self, states: Float[Tensor, "NK R s"]) -> Float[Tensor, "PK GR s"]:
        """Put the samples of a prompt side by side, so that its keys and values are read once."""
        rows, size = states.shape[1:]
        by_sample = states.view(-1, self._group_size, self._heads, rows, size)
        return by_sample.transpose(1, 2).reshape(-1, self._group_size * rows, size)

    def _by_sample(self, states: Float[Tensor, "PK GR s"]) -> Float[Tensor, "NK R s"]:
        rows, size = states.shape[1] // self._group_size, states.shape[2]
        by_head = states.view(-1, self._heads, self._group_size, rows, size)
        return by_head.transpose(1, 2).reshape(-1, rows, size)


def _before(
    layer: _Layer,
    hidden: Float[Tensor, "N D"],
    cos: Float[Tensor, "N 1 r"],
    sin: Float[Tensor, "N 1 r"],
    heads: int,
) -> tuple[Float[Tensor, "NK R d"], Float[Tensor, "N K d"], Float[Tensor, "N K d"]]:
    """Queries, keys and values of a layer."""
    rows = len(hidden)
    *unrotated, values = layer.project_qkv(layer.norm["input_layernorm"](hidden))
    rotated = _rotate(torch.cat(unrotated, dim=-1).view(rows, -1, layer.size), cos, sin)
    queries = rotated[:, :-heads].reshape(rows * heads, -1, layer.size)
    return queries, rotated[:, -heads:], values.view(rows, -1, layer.size)


def _after(
    layer: _Layer, hidden: Float[Tensor, "N D"], mixed: Float[Tensor, "NK R d"]
) -> Float[Tensor, "N D"]:
    """The part of a layer after attention."""
    attended = layer.project["o_proj"](mixed.view(len(hidden), -1))
    hidden = hidden + layer.norm["post_self_attn_layernorm"](attended)
    normed = layer.norm["post_attention_layernorm"](hidden)
    gate, up = layer.project["gate_up_proj"](normed).chunk(2, dim=-1)
    changed = layer.project["down_proj"](layer.activate(gate) * up)
    return hidden + layer.norm["post_mlp_layernorm"](changed)


@functools.cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`_before` and `_after` compiled, for all layers of all rollouts.

    Attention is not compiled, because it writes keys and values in place, and a compiler might copy
    them.
    """
    return torch.compile(_before, options=COMPILING), torch.compile(_after, options=COMPILING)


def _rotate(
    states: Float[Tensor, "N heads d"], cos: Float[Tensor, "N 1 r"], sin: Float[Tensor, "N 1 r"]
) -> Float[Tensor, "N heads d"]:
    """Rotate the first r of d entries by position."""
    turned, kept = states, None
    if cos.shape[-1] < states.shape[-1]:
        turned, kept = states.tensor_split([cos.shape[-1]], dim=-1)
    swapped = turned.roll(turned.shape[-1] // 2, dims=-1)
    turned = torch.addcmul(turned * cos, swapped, sin)
    return turned if kept is None else torch.cat([turned, kept], dim=-1)


def _parts(owner: Any, names: Sequence[str]) -> list[nn.Module]:
    return [getattr(owner, name) for name in names]


def _projections(layer: Any, dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    """Linear maps of a decoder layer by name, except those of `_side_by_side`."""
    modules = {
        "o_proj": layer.self_attn.o_proj,
        "gate_up_proj": layer.mlp.gate_up_proj,
        "down_proj": layer.mlp.down_proj,
    }
    return {name: _without_machinery(module, dtype) for name, module in modules.items()}


def _side_by_side(
    modules: Sequence[nn.Module], dtype: torch.dtype
) -> Callable[[Tensor], list[Tensor]]:
    """Linear maps of the same states, whose adapters share one first product."""
    factors = [each for module in modules if (each := half_factors(module, dtype)) is not None]
    if len(factors) < len(modules):
        maps = [_without_machinery(module, dtype) for module in modules]
        return lambda states: [each(states) for each in maps]
    downs, ups = zip(*factors, strict=True)
    bases = [_without_machinery(cast("Any", each).base_layer, dtype) for each in modules]
    return partial(
        _adapted_together,
        bases=bases,
        down=torch.cat(downs),
        ranks=[len(down) for down in downs],
        ups=ups,
    )


def _adapted_together(
    states: Tensor,
    *,
    bases: Sequence[Callable[[Tensor], Tensor]],
    down: Tensor,
    ranks: list[int],
    ups: Sequence[Tensor],
) -> list[Tensor]:
    reduced = nn.functional.linear(states, down).split(ranks, dim=-1)
    return [
        add_adapter(base(states), some, up)
        for base, some, up in zip(bases, reduced, ups, strict=True)
    ]


def _without_machinery(module: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The same operations without the overhead of modules, as long as a product of few rows.

    Quantised weights keep their own forward.

    Args:
        dtype: Dtype of the states it reads.
    """
    if type(module) is nn.Linear:
        return partial(nn.functional.linear, weight=module.weight, bias=module.bias)
    if not isinstance(module, AdaptedLinear) or not module.is_plain:
        return cast("Callable[[Tensor], Tensor]", module)
    base = _without_machinery(module.base_layer, dtype)
    if module.disable_adapters:
        return base
    factors = half_factors(module, dtype)
    if factors is not None:
        down, up = factors
        return partial(_adapted_in_half, base=base, down=down, up=up)
    (name,) = module.active_adapters
    return partial(
        _adapted,
        base=base,
        down=_without_machinery(module.lora_A[name], dtype),
        up=_without_machinery(module.lora_B[name], dtype),
        dtype=module.lora_A[name].weight.dtype,
        scaling=module.scaling[name],
    )


def _adapted_in_half(
    states: Tensor, *, base: Callable[[Tensor], Tensor], down: Tensor, up: Tensor
) -> Tensor:
    return add_adapter(base(states), nn.functional.linear(states, down), up)


def _adapted(
    states: Tensor,
    *,
    base: Callable[[Tensor], Tensor],
    down: Callable[[Tensor], Tensor],
    up: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    scaling: float,
) -> Tensor:
    """Compute what peft does, in its order."""
    # Added in place, so that the same operation rounds the sum to the dtype of the result.
    return base(states).add_(up(down(states.to(dtype))).mul_(scaling))


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    """The model's root-mean-square norm, in few operations if rounding allows it."""
    weight = module.weight
    size = len(weight)
    if weight.dtype != torch.float32:
        return partial(_normalise_rounded, weight=weight, epsilon=module.variance_epsilon)
    floor = weight.new_tensor(math.sqrt(size * module.variance_epsilon))
    return partial(_normalise, weight=weight * math.sqrt(size), floor=floor)


def _normalise_rounded(states: Tensor, *, weight: Tensor, epsilon: float) -> Tensor:
    """Like the model and replay: round before multiplying by the weight."""
    return nn.functional.rms_norm(states, weight.shape, eps=epsilon).mul_(weight)


def _normalise(states: Tensor, *, weight: Tensor, floor: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return (states / torch.hypot(length, floor)).mul_(weight)
