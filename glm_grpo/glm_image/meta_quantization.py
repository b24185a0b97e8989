"""Matrices of 4 bits on the meta device: the sizes of bitsandbytes' layer, which need not be there.

Tests hold these sizes against its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from glm_grpo.glm_image.quantization import BLOCK, KEPT_MODULES, SCALES_BLOCK


class MetaLinear4bit(nn.Linear):
    """A matrix of 4 bits with its scales; a product takes it in full for as long as it lasts.

    Args:
        linear: What is replaced.
    """

    def __init__(self, linear: nn.Linear) -> None:
        device = linear.weight.device
        # Its own matrix is never that of full size.
        super().__init__(1, 1, bias=False, device=device)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        entries = self.in_features * self.out_features
        blocks = math.ceil(entries / BLOCK)
        packed = torch.empty(math.ceil(entries / 2), 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8, device=device))
        # In fp32: scales of the scales, the two tables of values, the mean of the scales.
        singles = math.ceil(blocks / SCALES_BLOCK) + 16 + 256 + 1
        self.register_buffer("singles", torch.empty(singles, device=device))

    def forward(self, states: Tensor) -> Tensor:
        """As `nn.Linear`."""
        product: Tensor = _Product.apply(states, self)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """Keeps the packed matrix for the backward pass, not the one it multiplied with."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: MetaLinear4bit) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(states, _unpacked(layer, states))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ _unpacked(ctx.layer, gradient), None


def _unpacked(layer: MetaLinear4bit, like: Tensor) -> Tensor:
    return like.new_empty(layer.out_features, layer.in_features)


def quantize_on_meta(model: nn.Module) -> None:
    """Replaces the matrices that `options_for_4_bits` names."""
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear and not name.startswith(KEPT_MODULES):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, MetaLinear4bit(module))
