"""The SFT term: cross-entropy of the tokens of target images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from glm_grpo.grpo.minibatches import MicroBatch
from glm_grpo.grpo.policy import PolicyForUpdate
from glm_grpo.grpo.strategy import Strategy
from glm_grpo.grpo.update_metrics import LossTerm, weighted
from glm_grpo.types import Rollout, TargetTokens

SFT_METRICS = {
    "cross_entropy": "sft/cross_entropy",
    "cross_entropy/preview": "sft/cross_entropy/preview",
    "cross_entropy/target": "sft/cross_entropy/target",
    "entropy": "policy/entropy",
    "outside_codebook": "policy/outside_codebook",
}
"""Names of the metrics of a supervised step by the key that `learn_targets` returns."""


def learn_targets(
    policy: PolicyForUpdate,
    strategy: Strategy,
    targets: TargetTokens,
    micro_batches: Sequence[MicroBatch],
) -> LossTerm:
    """Accumulate the gradient of the SFT term of a minibatch."""
    if not micro_batches:
        return LossTerm(0.0, dict.fromkeys(SFT_METRICS, math.nan))
    parts = []
    for micro_batch in micro_batches:
        with strategy.accumulation(is_last=micro_batch is micro_batches[-1]):
            parts.append(_backward_targets(policy, strategy, targets, micro_batch))
    own = [math.fsum(part[name] for part in parts) for name in SFT_METRICS]
    everyone = zip(*strategy.gather(own), strict=True)
    means = dict(zip(SFT_METRICS, map(math.fsum, everyone), strict=True))
    return LossTerm(targets.weight * means["cross_entropy"], means)


def _backward_targets(
    policy: PolicyForUpdate, strategy: Strategy, targets: TargetTokens, micro_batch: MicroBatch
) -> dict[str, float]:
    """Accumulate the gradient of some target images; returns their part of the means."""
    token_ids = targets.token_ids.unsqueeze(1)
    rollout = Rollout(
        token_ids=token_ids,
        log_probs=torch.zeros_like(token_ids, dtype=torch.float32),
        sampling_mask=None,
    )
    replay = policy.replay(targets.prompts, rollout, micro_batch.rows)
    cross_entropy = -replay.log_probs.mean() * micro_batch.fraction
    strategy.backward(cross_entropy * (targets.weight * strategy.num_processes))
    nats = -replay.log_probs.detach()
    means = {
        "cross_entropy": nats,
        # NaN for images that are generated without a preview, such as edits.
        "cross_entropy/preview": nats[:, : replay.num_preview],
        "cross_entropy/target": nats[:, replay.num_preview :],
        "entropy": replay.entropy.detach(),
        "outside_codebook": replay.outside_codebook,
    }
    return weighted(means, micro_batch.fraction)
