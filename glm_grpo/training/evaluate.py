"""Held-out prompts, sampled and scored with fixed seeds: only the policy changes between two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm_grpo.glm_image.sampling import sample_rollout
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import CollectSettings, Stage, draw_and_score, join_tables
from glm_grpo.types import Evaluation, ImageBatch, PromptBatch
from rewards.reweigh import combine


def evaluate(
    stage: Stage, batches: Sequence[PromptBatch], settings: CollectSettings, *, step: int
) -> Evaluation:
    """Samples, decodes and scores every held-out prompt.

    Args:
        stage: Models.
        batches: All held-out prompts, in order.
        settings: Truncation and combination are used.
        step: Of the policy.
    """
    images, tables, entropies = [], [], []
    for batch in batches:
        with stage.residency.phase("rollout"):
            rollout = sample_rollout(
                stage.policy, batch, truncation=settings.truncation, policy_step=step
            )
        entropies.append(-rollout.log_probs.mean(dim=(1, 2)))
        drawn, scored = draw_and_score(stage, batch, rollout.token_ids, PhaseClock(lambda _: None))
        images.append(drawn)
        tables.append(scored)
    table = join_tables(tables)
    return Evaluation(
        step=step,
        prompts=tuple(prompt for batch in batches for prompt in batch.prompts),
        images=ImageBatch(
            pixels=torch.cat([image.pixels for image in images]),
            decode_seeds=tuple(seed for image in images for seed in image.decode_seeds),
        ),
        rewards=table,
        totals=combine(table, mode=settings.combine),
        entropy=torch.cat(entropies),
    )
