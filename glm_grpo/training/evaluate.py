"""Evaluate held-out prompts with fixed seeds, so that results differ only by the policy."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from glm_grpo.training.collate import join_images, join_tables
from glm_grpo.training.generate import decode_and_score, encode_sources, sample
from glm_grpo.training.models import Models
from glm_grpo.training.phases import Display, NoDisplay, PhaseClock
from glm_grpo.types import Evaluation, EvaluationPart, PromptBatch
from rewards.refusals import find_refusals
from rewards.types import RewardTable
from rewards.weighting import Mode, combine

logger = logging.getLogger(__name__)


def evaluate(
    models: Models,
    batches: Sequence[PromptBatch],
    *,
    step: int,
    display: Display | None = None,
) -> EvaluationPart:
    """Sample, decode and score held-out prompts.

    Args:
        batches: Held-out prompts in order, at least one batch.
        display: Display to notify of phases and prompts; None: no display.
    """
    display = display or NoDisplay()
    clock = PhaseClock(display)
    started = time.perf_counter()
    images, tables, entropies = [], [], []
    done, total = 0, sum(len(batch.prompts) for batch in batches)
    for each in batches:
        display.evaluating(done, total)
        done += len(each.prompts)
        batch = encode_sources(models, each, clock, is_evaluation=True)
        rollout = sample(models, batch, clock=clock, is_evaluation=True)
        entropies.append(-rollout.log_probs.mean(dim=(1, 2)))
        pixels, scores = decode_and_score(
            models, batch, rollout.token_ids, clock, is_evaluation=True
        )
        images.append(pixels)
        tables.append(scores)
    return EvaluationPart(
        step=step,
        prompts=tuple(prompt for batch in batches for prompt in batch.prompts),
        images=join_images(images),
        scores=join_tables(tables),
        entropy=torch.cat(entropies),
        seconds=time.perf_counter() - started,
    )


def weigh_evaluation(
    parts: Sequence[EvaluationPart], *, mode: Mode, base_scores: RewardTable | None
) -> Evaluation:
    """Combine parts into one evaluation with totals; warn of images that a term refused.

    Args:
        parts: Evaluated parts of the same policy in prompt order, at least one.
        base_scores: Scores of the run's evaluation at step 0; None if this is that evaluation.
    """
    table = join_tables([part.scores for part in parts])
    prompts = tuple(prompt for part in parts for prompt in part.prompts)
    for refused in find_refusals(prompts, table):
        if refused.count > 0:
            logger.warning(
                "evaluation at step %d: %s; they are left out of its means",
                parts[0].step,
                refused.describe(),
            )
    return Evaluation(
        step=parts[0].step,
        prompts=prompts,
        images=join_images([part.images for part in parts]),
        scores=table,
        totals=combine(table, mode=mode, base_scores=table if base_scores is None else base_scores),
        entropy=torch.cat([part.entropy for part in parts]),
    )
