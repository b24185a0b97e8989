"""Frozen weights in fewer bits: the language model's matrices in 4, the decoder's weights in 8."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import GlmImageTransformer2DModel
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available

from glm_grpo.errors import ModelError
from glm_grpo.models.offload import scales

KEPT_MODULES = ("lm_head", "model.visual", "model.vqmodel")
"""Not quantised: the head is scored with as it is, and the vision tower is small. The
token embedding is no matrix product and stays as well."""

BLOCK = 64
"""Entries of a matrix that share a scale: what bitsandbytes takes for 4 bits."""

SCALES_BLOCK = 256
"""Scales, of 8 bits each, that share a scale of their own (double quantisation)."""

STORED_IN_8_BITS = torch.float8_e4m3fn
"""4 bits of exponent, 3 of mantissa."""


def options_for_4_bits(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """How the language model is loaded, so that each matrix is quantised as it is read.

    Args:
        dtype: Of what is kept, and of the products.
        device: That quantises, and holds the whole model then. One device for all, so that
            accelerate puts no hooks on the modules, which would move them by themselves.

    Raises:
        ModelError: bitsandbytes is not installed.
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
            llm_int8_skip_modules=[*KEPT_MODULES],
        ),
    }


def move_to_cpu(model: nn.Module) -> None:
    """Moves weights, those of 4 bits with their scales, and buffers to CPU memory."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [tensor for weight in model.parameters() for tensor in scales(weight)]
    for tensor in tensors:
        tensor.data = tensor.data.cpu()


def hold_in_8_bits(transformer: GlmImageTransformer2DModel) -> None:
    """Keeps weights in 8 bits between their uses.

    Norms with what modulates them, the first and the last layer stay as they are.
    """
    transformer.enable_layerwise_casting(
        storage_dtype=STORED_IN_8_BITS, compute_dtype=transformer.dtype
    )
