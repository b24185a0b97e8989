"""Self-checks: refuse to train on a model whose sampling and replay disagree.

Two questions are kept apart. *Is the code path exact?* Sampling and replay must compute the same
distribution, which float32 shows: at full depth if the model is in float32, otherwise in its first
layers. *Is the precision enough?* In half precision at full depth, both round differently; the
importance weights of the loss correct for that, as long as enough tokens keep their weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from glm_grpo.data.prompts import prompts_at
from glm_grpo.errors import SelfCheckError
from glm_grpo.grpo.losses import effective_sample_size
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.training.generate import encode_sources
from glm_grpo.training.models import Models
from glm_grpo.training.out_of_memory import describe_sampling
from glm_grpo.types import PromptBatch, Rollout

TOLERANCE = 1e-3
"""Largest allowed mean |replayed - sampled| log-prob in float32, nats per token. Rounding causes
1e-6, while the positions of a plain forward pass cause 1e-2 and more."""

LEAST_SAMPLE_SIZE = 0.5
"""Smallest allowed effective sample size in half precision: fewer tokens would count than not.
Correct models in bf16 have 0.95 to 1."""

CHECKED_LAYERS = 2
"""Layers to check in float32: the second one reads what attention of the first has made."""

_CHECKED_GROUP = 2


@dataclass(frozen=True)
class ReplayReport:
    """Comparison of sampling and replay.

    Attributes:
        mean_gap: Mean |replayed - sampled| log-prob, nats per token.
        max_gap: Largest |replayed - sampled| log-prob.
        mean_ratio: Mean of exp(replayed - sampled).
        effective_sample_size: Fraction of tokens that count after weighting by these ratios.
    """

    mean_gap: float
    max_gap: float
    mean_ratio: float
    effective_sample_size: float

    def describe(self) -> str:
        """Describe it in one line."""
        return (
            f"{self.mean_gap:.1e} nats per token on average, largest {self.max_gap:.1e}, mean "
            f"ratio {self.mean_ratio:.4f}, effective sample size {self.effective_sample_size:.3f}"
        )


def check_code_path(models: Models, batch: PromptBatch, *, is_mixed: bool = False) -> str:
    """Sample and replay with the first layers in float32, unless the whole policy is checked so.

    The shortest and the longest prompt are read, so that one is padded if their lengths differ.
    On top of the policy, this takes the memory of two layers and the head in float32.

    Args:
        batch: Training prompts.
        is_mixed: Whether the engine computes in half precision with weights in float32.

    Returns:
        What was found, in one line; empty if everything is computed in float32.
    """
    policy = models.policy
    if policy.dtype == torch.float32 and not is_mixed:
        return ""
    lengths = [len(prompt.prompt) for prompt in batch.prompts]
    rows = dict.fromkeys(row(range(len(lengths)), key=lengths.__getitem__) for row in (min, max))
    few = replace(prompts_at(batch, torch.tensor([*rows])), group_size=_CHECKED_GROUP)
    few = encode_sources(models, few)
    with models.phase("rollout", describe_sampling(few, policy)):
        first = policy.first_layers(CHECKED_LAYERS)
        rollout = first.sample(few)
        index = torch.arange(rollout.token_ids[..., 0].numel())
        report = compare_replay(first, few, rollout, index)
    where = f"in the first {CHECKED_LAYERS} layers, computed in float32"
    _refuse_inexact(report, where)
    return f"sampling and replay agree {where}: {report.describe()}"


def check_replay(
    policy: AdaptedPolicy, batch: PromptBatch, rollout: Rollout, *, rows: int
) -> ReplayReport:
    """Check the first `rows` samples of an on-policy rollout at full depth.

    Every grid must be full and inside the codebook. In float32, replayed log-probs must equal the
    sampled ones; in half precision, their ratios must leave enough tokens.
    """
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
    report = compare_replay(policy, batch, rollout, index)
    if policy.dtype == torch.float32:
        _refuse_inexact(report, "")
    elif not report.effective_sample_size >= LEAST_SAMPLE_SIZE:
        raise SelfCheckError(
            f"sampled and replayed log-probs differ too much in {policy.dtype}: "
            f"{report.describe()}; importance weights correct for rounding only while the "
            f"effective sample size is at least {LEAST_SAMPLE_SIZE}. {_remedies(policy.dtype)}"
        )
    return report


@torch.no_grad()
def compare_replay(
    policy: AdaptedPolicy, batch: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
) -> ReplayReport:
    """Compare some samples' replayed log-probs with the sampled ones."""
    replayed = policy.replay(batch, rollout, rows).log_probs.cpu()
    gap = (replayed - rollout.log_probs.flatten(0, 1)[rows]).double()
    ratio = gap.exp()
    mean = ratio.mean().item()
    return ReplayReport(
        mean_gap=gap.abs().mean().item(),
        max_gap=gap.abs().max().item(),
        mean_ratio=mean,
        effective_sample_size=effective_sample_size(mean, ratio.square().mean().item()),
    )


def _refuse_inexact(report: ReplayReport, where: str) -> None:
    if report.mean_gap <= TOLERANCE and abs(report.mean_ratio - 1) <= TOLERANCE:
        return
    where = f" {where}" if where else ""
    raise SelfCheckError(
        f"sampled and replayed log-probs differ{where}: {report.describe()}; at most "
        f"{TOLERANCE:.0e} is allowed: training would follow a wrong gradient; check the "
        "transformers version and the attention backend"
    )


def _remedies(dtype: torch.dtype) -> str:
    finer = " or model.dtype=float16" if dtype == torch.bfloat16 else ""
    return (
        f"In a new run set model.dtype=float32{finer}, or a lower rollout.guidance_scale if the "
        "model has one"
    )
