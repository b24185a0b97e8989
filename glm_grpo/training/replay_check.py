"""Self-check: refuse to train on a model whose sampling and replay disagree.

Three facts are measured on a real rollout before the first update: every grid is full and inside
the codebook; replayed log-probs equal the sampled ones; so the ratios on-policy are 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm_grpo.errors import SelfCheckError
from glm_grpo.models.base import Policy
from glm_grpo.training.phase import tokens_per_image
from glm_grpo.types import Experience

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest allowed mean |replayed - sampled| log-prob, nats a token, by the dtype of the weights.

fp32: rounding is 1e-6; the positions of a plain forward pass are off by 1e-2 and more. bf16 keeps 8
bits: cached decoding and a full pass differ by 1e-2 without any mistake.
"""


@dataclass(frozen=True)
class ReplayReport:
    """What was measured.

    Attributes:
        mean_gap: Mean |replayed - sampled| log-prob, nats a token.
        max_gap: Largest of them.
        mean_ratio: Mean of exp(replayed - sampled).
    """

    mean_gap: float
    max_gap: float
    mean_ratio: float


@torch.no_grad()
def check_replay(policy: Policy, experience: Experience, *, rows: int) -> ReplayReport:
    """Checks the first `rows` samples of an on-policy experience.

    Raises:
        SelfCheckError: Says which of the three facts does not hold, by how much.
    """
    batch, rollout = experience.prompts, experience.rollout
    num_tokens = tokens_per_image(batch, policy)
    if rollout.token_ids.shape[-1] != num_tokens:
        raise SelfCheckError(
            f"a grid has {rollout.token_ids.shape[-1]} tokens; {batch.height} x {batch.width} "
            f"pixels need {num_tokens}; the model's grids are not those of its kind"
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
            f"sampled and replayed log-probs differ by {report.mean_gap:.2e} nats a token on "
            f"average (largest {report.max_gap:.2e}, mean ratio {report.mean_ratio:.4f}); at most "
            f"{tolerance:.0e} is allowed for {policy.dtype}; training would "
            "follow a wrong gradient; check the transformers version and the attention backend"
        )
    return report
