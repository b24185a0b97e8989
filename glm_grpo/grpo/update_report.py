"""What an update is reported by, over the micro-batches of all processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from glm_grpo.grpo.engine import Engine
from glm_grpo.grpo.losses import GrpoLoss, effective_sample_size
from glm_grpo.grpo.replay import Replay
from glm_grpo.types import LossReport


@dataclass(frozen=True)
class Scored:
    """What one micro-batch leaves for the report, without gradient."""

    share: float
    loss: GrpoLoss
    replay: Replay
    gap: Float32[Tensor, "N T"]


def sums_of(parts: Sequence[Scored], engine: Engine) -> dict[str, float]:
    """Over the sequences of all processes: means, and sums over tokens."""
    rows = [_weigh(part) for part in parts if part.share > 0]
    own = torch.tensor([[*row.values()] for row in rows], dtype=torch.float64).sum(dim=0)
    everyone = torch.tensor(engine.gather(own.tolist()), dtype=torch.float64).sum(dim=0)
    return dict(zip(rows[0], everyone.tolist(), strict=True))


def _weigh(part: Scored) -> dict[str, float]:
    loss, replay, ratio = part.loss, part.replay, part.loss.surrogate.ratio.double()
    means = {
        "total": loss.total,
        "policy": loss.policy,
        "kl": loss.kl,
        "kl_reference": loss.kl_reference,
        "kl_behaviour": loss.kl_behaviour,
        "ratio_mean": ratio.mean(),
        "clip_fraction": loss.surrogate.is_clipped.double().mean(),
        "entropy": replay.entropy.double().mean(),
        "log_prob": replay.log_probs.double().mean(),
        "outside_codebook": replay.outside_codebook.double().mean(),
        "replay_gap": part.gap.double().mean(),
    }
    return {
        **{name: part.share * float(mean) for name, mean in means.items()},
        "ratio_sum": float(ratio.sum()),
        "square_sum": float(ratio.square().sum()),
        "num_tokens": float(ratio.numel()),
    }


def report_update(
    sums: Mapping[str, float],
    *,
    grad_norm: float,
    learning_rate: float,
    first: LossReport | None,
) -> LossReport:
    """`first` is of the first update of the rollout; None where this is it."""
    return LossReport(
        total=sums["total"],
        policy=sums["policy"],
        kl=sums["kl"],
        kl_reference=sums["kl_reference"],
        kl_behaviour=sums["kl_behaviour"],
        ratio_mean=sums["ratio_mean"],
        clip_fraction=sums["clip_fraction"],
        effective_sample_size=effective_sample_size(
            sums["ratio_sum"], sums["square_sum"], int(sums["num_tokens"])
        ),
        entropy=sums["entropy"],
        log_prob=sums["log_prob"],
        outside_codebook=sums["outside_codebook"],
        replay_gap=sums["replay_gap"] if first is None else first.replay_gap,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        is_skipped=not (math.isfinite(sums["total"]) and math.isfinite(grad_norm)),
    )
