"""Self-check: refuse to train on a model whose sampling and replay disagree.

Before the first update, three facts are checked on a real rollout: every grid is full and inside
the codebook; replayed log-probs equal the sampled ones; therefore on-policy ratios are 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm_grpo.errors import SelfCheckError
from glm_grpo.models.base import Policy
from glm_grpo.types import Experience

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest allowed mean |replayed - sampled| log-prob, nats per token, by weight dtype.

fp32: rounding causes 1e-6, while the positions of a plain forward pass cause 1e-2 and more. bf16
    has 8 bits of precision: cached decoding and a full pass differ by 1e-2 even when both are
    correct, and guidance multiplies the difference.
"""


@dataclass(frozen=True)
class ReplayReport:
    """Measurements of the self-check.

    Attributes:
        mean_gap: Mean |replayed - sampled| log-prob, nats per token.
        max_gap: Largest |replayed - sampled| log-prob.
        mean_ratio: Mean of exp(replayed - sampled).
    """

    mean_gap: float
    max_gap: float
    mean_ratio: float


@torch.no_grad()
def check_replay(policy: Policy, experience: Experience, *, rows: int) -> ReplayReport:
    """Check the first `rows` samples of an on-policy experience.

    Raises:
        SelfCheckError: One of the three facts does not hold; the message says which and by how
            much.
    """
    batch, rollout = experience.prompts, experience.rollout
    num_tokens = policy.tokens_per_image(batch)
    if rollout.token_ids.shape[-1] != num_tokens:
        raise SelfCheckError(
            f"a grid has {rollout.token_ids.shape[-1]} tokens; {batch.height} x {batch.width} "
            f"pixels need {num_tokens}; the model does not lay out its grids as its family does"
        )
    low, high = int(rollout.token_ids.min()), int(rollout.token_ids.max())
    if low < 0 or high >= policy.codebook_size:
        raise SelfCheckError(
            f"token ids run from {low} to {high}; the codebook has {policy.codebook_size} entries"
        )
    index = torch.arange(min(rows, rollout.token_ids[..., 0].numel()))
    replayed = policy.replay(experience.prompts, rollout, index).log_probs.cpu()
    gap = replayed - rollout.log_probs.flatten(0, 1)[index]
    report = ReplayReport(
        mean_gap=gap.abs().mean().item(),
        max_gap=gap.abs().max().item(),
        mean_ratio=gap.exp().mean().item(),
    )
    tolerance = TOLERANCES[policy.dtype]
    if not report.mean_gap <= tolerance or not abs(report.mean_ratio - 1) <= tolerance:
        raise SelfCheckError(
            f"sampled and replayed log-probs differ by {report.mean_gap:.2e} nats per token on "
            f"average (largest {report.max_gap:.2e}, mean ratio {report.mean_ratio:.4f}); at most "
            f"{tolerance:.0e} is allowed for {policy.dtype}; training would follow a wrong "
            "gradient; check the transformers version and the attention backend"
        )
    return report
