"""Scale the loss of a float16 policy, so that small gradients do not become 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

_FIRST = 2.0**16
_LOWERED = 0.25
_UPDATES_UNTIL_RAISED = 200


@dataclass
class LossScale:
    """Factor of the loss in the backward pass; gradients are divided by it afterwards.

    A gradient below 6e-8 is 0 in float16, and one above 65,504 is infinite. The loss is a mean over
    tens of thousands of tokens, so the gradients of its single tokens are near the lower end.
    Gradients that overflow are computed again with a lower scale, because a rollout costs more than
    a second backward pass; `torch.amp.GradScaler` would skip the update.

    Source: Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), section 3.2.

    Attributes:
        value: The factor, a power of two >= 1.
        finite_updates: Updates in a row without overflow, since the scale last changed.
        is_used: Whether the policy needs a scale; if not, it stays 1.
    """

    value: float = 1.0
    finite_updates: int = 0
    is_used: bool = False

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> LossScale:
        """The scale to begin with, for a policy with weights of this dtype."""
        return cls(_FIRST, is_used=True) if dtype == torch.float16 else cls()

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the gradients by the scale."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.value != 1.0 and gradients:
            torch._foreach_mul_(gradients, 1.0 / self.value)

    def lower(self) -> bool:
        """Lower the scale after an overflow; returns whether it was above 1."""
        if self.value == 1.0:
            return False
        self.value, self.finite_updates = max(1.0, self.value * _LOWERED), 0
        return True

    def note_finite(self) -> None:
        """Record an update without overflow; after many, double the scale."""
        if not self.is_used:
            return
        self.finite_updates += 1
        if self.finite_updates == _UPDATES_UNTIL_RAISED:
            self.value, self.finite_updates = 2.0 * self.value, 0
