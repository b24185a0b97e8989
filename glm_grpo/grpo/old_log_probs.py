"""Denominators of the ratios: log-probs under the policy that the updates of a step begin with."""

from __future__ import annotations

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from glm_grpo.types import Rollout


class OldLogProbs:
    """Log-probs of the sampled tokens under the policy that the updates begin with.

    They come from replay, not from the sampler: a sequence's first replay has to take place before
    the policy moves.
    """

    def __init__(self, rollout: Rollout) -> None:
        self._log_probs = torch.full_like(rollout.log_probs.flatten(0, 1), torch.nan)
        self._is_filled = torch.zeros(len(self._log_probs), dtype=torch.bool)

    def fill(self, rows: Int64[Tensor, " N"], replayed: Float32[Tensor, "N T"]) -> None:
        """Store the log-probs of those rows that have none yet."""
        is_first = ~self._is_filled[rows]
        self._log_probs[rows[is_first]] = replayed.cpu()[is_first]
        self._is_filled[rows] = True

    def of_rows(self, rows: Int64[Tensor, " N"]) -> Float32[Tensor, "N T"]:
        """Log-probs of rows that were filled; NaN for others."""
        return self._log_probs[rows]
