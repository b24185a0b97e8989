"""Store a language model's frozen matrices in 4 bits."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available

from glm_grpo.errors import ModelError
from glm_grpo.models.offload import scales


def options_for_4_bits(
    dtype: torch.dtype, device: torch.device, *, kept: Sequence[str]
) -> dict[str, Any]:
    """Loading options with which each matrix is quantised as it is read.

    Args:
        dtype: Dtype of unquantised weights, and of the products.
        device: Device that quantises, and then holds the whole model. Naming one device keeps
            accelerate from adding hooks that move modules on their own.
        kept: Paths of the modules to keep unquantised.
    """
    if not is_bitsandbytes_available():
        raise ModelError(
            "model.quantization is 'nf4': it needs bitsandbytes, which is not installed; run "
            "`pip install bitsandbytes` (or install this package with its extra 4bit), or leave "
            "model.quantization out"
        )
    return {
        "device_map": {"": device},
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=[*kept],
        ),
    }


def move_to_cpu(model: nn.Module) -> None:
    """Move weights (4-bit ones with their scales) and buffers to CPU memory."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [tensor for weight in model.parameters() for tensor in scales(weight)]
    for tensor in tensors:
        tensor.data = tensor.data.cpu()


def dequantize(network: nn.Module) -> None:
    """Replace layers in 4 bits by layers with the weights that they stand for, in float32."""
    for module in list(network.modules()):
        children: list[tuple[str, Any]] = list(module.named_children())
        for name, layer in children:
            state = getattr(getattr(layer, "weight", None), "quant_state", None)
            if state is None:
                continue
            weight = importlib.import_module("bitsandbytes.functional").dequantize_4bit(
                layer.weight.data, state
            )
            bias = layer.bias is not None
            plain = nn.Linear(layer.in_features, layer.out_features, bias, device="meta")
            plain.weight = nn.Parameter(weight.float(), requires_grad=False)
            if bias:
                plain.bias = nn.Parameter(layer.bias.data.float(), requires_grad=False)
            setattr(module, name, plain)
