"""Peak memory of code that runs on the meta device: sizes without values, and nothing allocated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
"""Tensors there have a shape and a type."""


class MetaMemory(TorchDispatchMode):
    """Counts the bytes of all meta tensors that operations make, until Python drops them.

    What existed before counts for nothing. Not seen: scratch space inside operations, and what a
    caching allocator keeps or loses between blocks.

    Attributes:
        live_bytes: At this moment.
        peak_bytes: The most there were at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operation and notes the storages it made."""
        # A view of a weight is no memory of its own: storages that come in are known already.
        for tensor in _meta_tensors((args, kwargs)):
            self._note(tensor, 0)
        out = func(*args, **(kwargs or {}))
        for tensor in _meta_tensors(out):
            self._note(tensor, tensor.untyped_storage().nbytes())
        return out

    def _note(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Attention as devices with a fused kernel run it; the meta device would take the plain one.

    The function itself is replaced: a mode of torch is left by backward passes, in which
    checkpointing computes attention again.
    """
    functions: Any = nn.functional
    stock = functions.scaled_dot_product_attention
    functions.scaled_dot_product_attention = _attend
    try:
        yield
    finally:
        functions.scaled_dot_product_attention = stock


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # Fused kernels add a mask: it is made of the queries' type, and kept for the backward pass.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask, 0)
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return attended


@contextmanager
def measured_on_meta() -> Iterator[MetaMemory]:
    """Everything inside runs on meta tensors and is counted."""
    memory = MetaMemory()
    # The module replaces its own class at import, which type checkers do not see.
    config: Any = fx_config
    with ExitStack() as stack:
        # A boolean index picks all entries, the most it can.
        stack.enter_context(config.patch(meta_nonzero_assume_all_nonzero=True))
        stack.enter_context(_fused_attention())
        stack.enter_context(memory)
        yield memory


def module_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all weights and buffers."""
    tensors = {id(tensor): tensor for module in modules for tensor in _weights_and_buffers(module)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def pinned_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes they take in pinned CPU memory, of which torch takes powers of two for each tensor."""
    sizes = [
        tensor.numel() * tensor.element_size()
        for module in modules
        for tensor in _weights_and_buffers(module)
    ]
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def _weights_and_buffers(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _meta_tensors(values: object) -> Iterator[Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.device.type == META.type:
            yield value
