"""Keep modules on the accelerator only in the phases that use them, else in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Phase = Literal["sources", "rollout", "decode", "reward", "update"]

NEEDED: Mapping[Phase, frozenset[str]] = {
    "sources": frozenset({"vision"}),
    "rollout": frozenset({"policy"}),
    "decode": frozenset({"decoder"}),
    "reward": frozenset({"rewards"}),
    "update": frozenset({"policy", "reference", "optimizer"}),
}
"""Parts that each phase uses."""


@runtime_checkable
class Movable(Protocol):
    """A part that can wait in CPU memory."""

    def load(self) -> None:
        """Move it to the accelerator."""
        ...

    def evict(self) -> None:
        """Move it back to CPU memory."""
        ...


class ModulePart:
    """Modules that move together.

    Each weight keeps its place in (pinned) CPU memory. Frozen weights are only copied to the
    accelerator. Trained weights are also copied back, and so are frozen weights that were written
    meanwhile, such as a reference that follows the policy.
    """

    def __init__(self, modules: Sequence[nn.Module], *, device: torch.device) -> None:
        self._device = device
        self._tensors: list[Tensor] = []
        for module in modules:
            self._tensors += [*module.parameters(), *module.buffers()]
            self._tensors += [tensor for weight in module.parameters() for tensor in scales(weight)]
        is_pinned = device.type == "cuda"
        self._homes = [
            tensor.data.pin_memory() if is_pinned else tensor.data for tensor in self._tensors
        ]
        for tensor, home in zip(self._tensors, self._homes, strict=True):
            tensor.data = home
        self._versions = [tensor._version for tensor in self._tensors]

    def load(self) -> None:
        """Move all weights to the accelerator."""
        for tensor, home in zip(self._tensors, self._homes, strict=True):
            tensor.data = home.to(self._device, non_blocking=True)
        self._versions = [tensor._version for tensor in self._tensors]

    def evict(self) -> None:
        """Drop the accelerator's copies, after saving changed weights."""
        for tensor, home, version in zip(self._tensors, self._homes, self._versions, strict=True):
            # Kernels of other packages may write trained weights without raising their version.
            if tensor.requires_grad or tensor._version != version:
                home.copy_(tensor.data)
            tensor.data = home


class OptimizerPart:
    """The state of an optimizer (its moments), moved tensor by tensor."""

    def __init__(self, optimizer: Optimizer, *, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device

    def load(self) -> None:
        """Move the state to the accelerator."""
        self._move(self._device)

    def evict(self) -> None:
        """Move the state to CPU memory."""
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for state in self._optimizer.state.values():
            for name, value in state.items():
                # The step counter stays where torch keeps it, on the CPU.
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[name] = value.to(device, non_blocking=device.type != "cpu")


class Offload:
    """Moves parts in and out as phases begin.

    Args:
        parts: Parts by name; a part that no phase names, or that is missing here, is never moved.
    """

    def __init__(self, parts: Mapping[str, Movable]) -> None:
        self._parts = dict(parts)
        self._resident: set[str] = set()

    def add(self, name: str, part: Movable) -> None:
        """Add a part that is created after the models, such as the optimizer."""
        self._parts[name] = part

    def moves(self, name: str) -> bool:
        """Whether a part is moved at all; if not, it is always where it is used."""
        return name in self._parts

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Free memory first, then load what the phase needs and is not loaded."""
        needed = NEEDED[phase] & self._parts.keys()
        for name in sorted(self._resident - needed):
            self._parts[name].evict()
            self._resident.discard(name)
        for name in sorted(needed - self._resident):
            self._parts[name].load()
            self._resident.add(name)
        yield


def scales(weight: nn.Parameter) -> Iterator[Tensor]:
    """Tensors that a 4-bit weight needs, and that no module has as a buffer."""
    # bitsandbytes attaches it to the parameter. Its class cannot be imported if it is not
    # installed.
    state = vars(weight).get("quant_state")
    if state is not None:
        yield from _tensors_in(state)


def _tensors_in(state: object) -> Iterator[Tensor]:
    for value in vars(state).values():
        if isinstance(value, Tensor):
            yield value
        elif type(value) is type(state):
            # The scales have their own scales.
            yield from _tensors_in(value)
