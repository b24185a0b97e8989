"""LoRA on a language model, with one adapter product for both sampling and replay."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from glm_grpo.config.sections import AdapterSection

_HALF = (torch.bfloat16, torch.float16)


def adapt(
    model: nn.Module, modules: Sequence[str], adapter: AdapterSection, *, seed: int
) -> PeftModel:
    """Add LoRA to linear layers of the language model; the adapters initially change nothing.

    Args:
        modules: Names of the layers that can be adapted; `adapter` may choose among them.
        seed: Seed of the first factors; the second ones are 0.
    """
    names = "|".join(adapter.target_modules or modules)
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=0.0,
        target_modules=rf"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.({names})",
    )
    # Layers with 4-bit weights are subclasses of `nn.Linear`, too.
    config._register_custom_module({nn.Linear: AdaptedLinear})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            # peft uses a name that transformers is about to remove.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            adapted = get_peft_model(model, config)
    return adapted.eval()


def adapter_tensors(adapted: PeftModel) -> dict[str, Tensor]:
    """Tensors of the adapters by name."""
    # By default peft asks the hub, at each call, whether there are new words.
    return dict(get_peft_model_state_dict(adapted, save_embedding_layers=False))


class AdaptedLinear(LoraLinear):
    """Like peft's layer, but half-precision states are multiplied by factors cast to their dtype.

    The factors stay in fp32, where the optimizer changes them. peft multiplies in fp32 as well,
    which causes most of a step's elementwise traffic, although the sum is rounded to the states'
    dtype anyway. For fp32 states this calls peft's code and is bitwise equal.

    Attributes:
        held: Cast factors by dtype, inside `held_factors`.
    """

    held: dict[torch.dtype, tuple[Tensor, Tensor]] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether exactly one adapter is active, in its simplest form and not merged."""
        return len(self.active_adapters) == 1 and not (self.merged or self.lora_variant)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Like peft's."""
        factors = half_factors(self, x.dtype)
        if factors is None or args or kwargs:
            changed: Tensor = super().forward(x, *args, **kwargs)
            return changed
        down, up = factors
        # In two dimensions the product is added in place; in a view, the backward pass would copy
        # it.
        rows = x.flatten(0, -2)
        added = add_adapter(self.base_layer(rows), nn.functional.linear(rows, down), up)
        return added.unflatten(0, x.shape[:-1])


@contextmanager
def held_factors(model: nn.Module) -> Iterator[None]:
    """Cast the factors of each layer only once inside, where nothing may change them.

    For a rollout of 24 layers, that saves 336 casts and 168 products per token.
    """
    layers = [each for each in model.modules() if isinstance(each, AdaptedLinear)]
    for layer in layers:
        layer.held = {}
    try:
        yield
    finally:
        for layer in layers:
            layer.held = None


def half_factors(
    module: Any, dtype: torch.dtype
) -> tuple[Float[Tensor, "r D"], Float[Tensor, "O r"]] | None:
    """Both factors of an adapter in half precision, the second one scaled.

    Args:
        module: Linear layer.
        dtype: Dtype of the states that it reads.

    Returns:
        The factors; None if there is no plain adapter, it is switched off, or `dtype` is not half.
    """
    is_adapted = isinstance(module, AdaptedLinear) and not module.disable_adapters
    if dtype not in _HALF or not is_adapted or not module.is_plain:
        return None
    (name,) = module.active_adapters
    held = {} if module.held is None else module.held
    if dtype not in held:
        up = module.lora_B[name].weight * module.scaling[name]
        held[dtype] = module.lora_A[name].weight.to(dtype), up.to(dtype)
    factors: tuple[Tensor, Tensor] = held[dtype]
    return factors


def add_adapter(
    base: Float[Tensor, "N O"], reduced: Float[Tensor, "N r"], up: Float[Tensor, "O r"]
) -> Float[Tensor, "N O"]:
    """Add reduced @ up.T to the base layer's output, in place, with a single rounding.

    Args:
        base: Output of the base layer.
        reduced: States after the adapter's first factor.
        up: Second factor, scaled.
    """
    return base.addmm_(reduced, up.T)
