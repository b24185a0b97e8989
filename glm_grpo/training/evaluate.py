"""Held-out prompts, sampled and scored with fixed seeds: only the policy changes between two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm_grpo.models.glm_image.sampling import sample_rollout
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import (
    CollectSettings,
    Stage,
    draw_and_score,
    join_images,
    join_tables,
)
from glm_grpo.training.out_of_memory import out_of_memory_explained, sampling_size
from glm_grpo.types import Evaluation, EvaluationPart, PromptBatch
from rewards.reweigh import Mode, combine
from rewards.types import RewardTable


def evaluate(
    stage: Stage, batches: Sequence[PromptBatch], settings: CollectSettings, *, step: int
) -> EvaluationPart:
    """Samples, decodes and scores held-out prompts.

    Args:
        stage: Models.
        batches: Held-out prompts, in order, at least one batch.
        settings: The truncation is used.
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
    return EvaluationPart(
        step=step,
        prompts=tuple(prompt for batch in batches for prompt in batch.prompts),
        images=join_images(images),
        rewards=join_tables(tables),
        entropy=torch.cat(entropies),
    )


def weigh_evaluation(
    parts: Sequence[EvaluationPart], *, mode: Mode, untrained: RewardTable | None
) -> Evaluation:
    """One evaluation with its totals.

    Args:
        parts: Of the same policy, prompts after prompts, at least one.
        mode: How the terms are combined.
        untrained: Scores of the run's evaluation of step 0; None where this is that one.

    Raises:
        RewardError: See `combine`.
    """
    table = join_tables([part.rewards for part in parts])
    return Evaluation(
        step=parts[0].step,
        prompts=tuple(prompt for part in parts for prompt in part.prompts),
        images=join_images([part.images for part in parts]),
        rewards=table,
        totals=combine(table, mode=mode, untrained=table if untrained is None else untrained),
        entropy=torch.cat([part.entropy for part in parts]),
    )
