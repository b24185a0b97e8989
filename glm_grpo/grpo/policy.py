"""What an update needs from a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float32, Int64
from torch import Tensor, nn

from glm_grpo.types import PromptBatch, Rollout


@dataclass(frozen=True)
class Replay:
    """The policy's current scores of tokens that were sampled before.

    Attributes:
        log_probs: Log-probabilities (natural) under the distribution the tokens were drawn from;
            with gradient.
        entropy: Entropy of that distribution at each token, nats; with gradient if the policy was
            built to provide one.
        outside_codebook: Total probability of tokens that are not part of an image, which sampling
            and replay exclude, in [0, 1).
        num_preview: Number of preview tokens at the start of each sequence; 0 if there is no
            preview.
    """

    log_probs: Float32[Tensor, "N T"]
    entropy: Float32[Tensor, "N T"]
    outside_codebook: Float32[Tensor, "N T"]
    num_preview: int = 0


@runtime_checkable
class PolicyForUpdate(Protocol):
    """What an update needs from a policy. Rows index the flattened P * G axis."""

    def replay(self, batch: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]) -> Replay:
        """Score the tokens of these rows, with gradient."""
        ...

    def trainable_parameters(self) -> Sequence[nn.Parameter]:
        """Parameters that the optimizer updates, and whose gradient is clipped."""
        ...
