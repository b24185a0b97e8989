"""Bytes and operations of modules, for plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config
from torch.utils.flop_counter import FlopCounterMode

from glm_grpo.models.planning import PartBytes


def pinned(sizes: Sequence[int]) -> int:
    """Bytes in pinned CPU memory, where torch rounds each tensor up to a power of two."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def part_bytes(modules: Iterable[nn.Module]) -> PartBytes:
    """Bytes of all weights and buffers."""
    tensors = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return PartBytes(sum(sizes), pinned(sizes))


def matrix_names(layer: nn.Module) -> tuple[str, ...]:
    """Names of the modules of a layer's matrices, without those around them."""
    weights = {name: each for name, each in layer.named_parameters() if each.dim() > 1}
    return tuple(name.removesuffix(".weight").rpartition(".")[2] for name in weights)


def describe_parameters(*modules: nn.Module) -> str:
    """Number of parameters of all modules together, such as `4.8 M`."""
    count = sum(weight.numel() for module in modules for weight in module.parameters())
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def count_flops(work: Callable[[], object]) -> int:
    """Operations of some work on torch's meta device, without gradient."""
    # The module replaces its own class on import, which type checkers cannot see.
    config: Any = fx_config
    # A boolean index selects all entries, the maximum.
    every = config.patch(meta_nonzero_assume_all_nonzero=True)
    with torch.no_grad(), every, FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())
