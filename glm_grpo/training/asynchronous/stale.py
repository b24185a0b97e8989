"""Experience that was sampled by a policy older than the one that learns from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from glm_grpo.grpo.losses import StaleTreatment, importance_weights
from glm_grpo.training.phase import Models, PhaseClock, replay_size
from glm_grpo.types import Experience, OffPolicyCorrection


@dataclass(frozen=True)
class StaleSettings:
    """How stale experience counts.

    Attributes:
        treatment: Of tokens that have become much more likely since they were sampled.
        max_importance_ratio: From which ratio on a token is such a one, >= 1.
        min_importance_ratio: Below which `mask` leaves a token out, too, in [0, 1].
        micro_batch_size: Sequences scored at once.
    """

    treatment: StaleTreatment
    max_importance_ratio: float
    min_importance_ratio: float
    micro_batch_size: int


@torch.no_grad()
def correct_stale(
    models: Models, experience: Experience, settings: StaleSettings, clock: PhaseClock
) -> tuple[Experience, dict[str, float]]:
    """Weighs the tokens of an older policy, by one more forward pass of the present one.

    Args:
        models: Their policy has the weights that are about to learn.
        experience: Sampled by older ones.
        settings: Plain values.
        clock: Gets the time of the forward pass, as phase `proximal`.

    Returns:
        The experience with its correction, and figures of it: `async/importance_ratio`, the mean
        over tokens, and `async/truncated_fraction`, the share of those outside the limits.

    Raises:
        MemoryLimitError: Memory ran out; names phase, size and remedy.
    """
    old_log_probs = experience.rollout.log_probs
    shape = old_log_probs.shape[:2]
    size = replay_size(experience.prompts, models.policy, settings.micro_batch_size)
    with models.phase("update", size, clock, timed_as="proximal"):
        rows = torch.arange(shape.numel()).split(settings.micro_batch_size)
        parts = [
            models.policy.replay(experience.prompts, experience.rollout, part).log_probs.cpu()
            for part in rows
        ]
    log_probs = torch.cat(parts).unflatten(0, shape)
    weights = importance_weights(
        log_probs,
        old_log_probs,
        largest=settings.max_importance_ratio,
        treatment=settings.treatment,
        smallest=settings.min_importance_ratio,
    )
    ratios = (log_probs - old_log_probs).exp()
    is_above = ratios > settings.max_importance_ratio
    is_outside = is_above | (ratios < settings.min_importance_ratio)
    return replace(experience, correction=OffPolicyCorrection(log_probs, weights)), {
        "async/importance_ratio": ratios.mean().item(),
        "async/truncated_fraction": is_outside.float().mean().item(),
    }
