"""What an update needs of a policy: its present view of tokens that were sampled before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float32, Int64
from torch import Tensor, nn

from glm_grpo.types import PromptBatch, Rollout


@dataclass(frozen=True)
class Replay:
    """The policy's present view of tokens that were sampled before.

    Attributes:
        log_probs: Natural logarithm, of the distribution the tokens were drawn from; with gradient.
        entropy: Of that distribution at each token, nats.
        outside_codebook: The probability of a token that is none of a picture, which neither
            sampling nor replay lets come, in [0, 1).
    """

    log_probs: Float32[Tensor, "N T"]
    entropy: Float32[Tensor, "N T"]
    outside_codebook: Float32[Tensor, "N T"]


@runtime_checkable
class PolicyForUpdate(Protocol):
    """What an update needs of a policy. Rows index the flattened P * G axis."""

    def replay(self, prompts: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]) -> Replay:
        """Score the tokens of these rows, with gradient."""
        ...

    def reference_log_probs(
        self, prompts: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N T"]:
        """Score the tokens of these rows under the reference policy, without gradient."""
        ...

    def trainable_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters the optimizer moves, whose gradient is clipped."""
        ...
