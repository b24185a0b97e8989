"""Which weights are stored in fewer bits: the language model's in 4, the decoder's in 8."""

from __future__ import annotations

import torch
from diffusers import GlmImageTransformer2DModel

KEPT_MODULES = ("lm_head", "model.visual", "model.vqmodel")
"""Modules to keep unquantised: the head, because it computes the scores, and the vision tower,
because it is small. The token embedding is not a matrix product and stays as well."""

STORED_IN_8_BITS = torch.float8_e4m3fn
"""Dtype with 4 exponent bits and 3 mantissa bits."""


def hold_in_8_bits(transformer: GlmImageTransformer2DModel) -> None:
    """Store weights in 8 bits between their uses.

    Norms and their modulation, and the first and last layers, are kept.
    """
    transformer.enable_layerwise_casting(
        storage_dtype=STORED_IN_8_BITS, compute_dtype=transformer.dtype
    )
