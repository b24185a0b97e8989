"""Held-out prompts, sampled and scored with fixed seeds: only the policy changes between two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from glm_grpo.glm_image.sampling import sample_rollout
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import (
    CollectSettings,
    Stage,
    draw_and_score,
    join_images,
    join_tables,
)
from glm_grpo.training.out_of_memory import out_of_memory_explained, sampling_size
from glm_grpo.types import Evaluation, PromptBatch
from rewards.reweigh import combine


def evaluate(
    stage: Stage, batches: Sequence[PromptBatch], settings: CollectSettings, *, step: int
) -> Evaluation:
    """Samples, decodes and scores every held-out prompt.

    Args:
        stage: Models.
        batches: Held-out prompts, in order, at least one batch.
        settings: Truncation and combination are used.
        step: Of the policy.
    """
    images, tables, entropies = [], [], []
    for batch in batches:
        with (
            out_of_memory_explained("evaluation", sampling_size(batch)),
            stage.residency.phase("rollout"),
        ):
            rollout = sample_rollout(
                stage.policy,
                batch,
                truncation=settings.truncation,
                policy_step=step,
                phase="evaluation",
            )
        entropies.append(-rollout.log_probs.mean(dim=(1, 2)))
        clock = PhaseClock(lambda _: None)
        drawn, scored = draw_and_score(stage, batch, rollout.token_ids, clock, is_evaluation=True)
        images.append(drawn)
        tables.append(scored)
    table = join_tables(tables)
    return Evaluation(
        step=step,
        prompts=tuple(prompt for batch in batches for prompt in batch.prompts),
        images=join_images(images),
        rewards=table,
        totals=combine(table, mode=settings.combine),
        entropy=torch.cat(entropies),
    )


def join_evaluations(parts: Sequence[Evaluation]) -> Evaluation:
    """Evaluations of the same policy on prompts after prompts, at least one."""
    return replace(
        parts[0],
        prompts=tuple(prompt for part in parts for prompt in part.prompts),
        images=join_images([part.images for part in parts]),
        rewards=join_tables([part.rewards for part in parts]),
        totals=torch.cat([part.totals for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
    )
