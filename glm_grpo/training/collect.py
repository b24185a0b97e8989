"""Prompts -> Experience: sample, decode, score, compare inside groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from glm_grpo.glm_image.decoder import Decoder
from glm_grpo.glm_image.policy import Policy
from glm_grpo.glm_image.residency import Residency
from glm_grpo.glm_image.sampling import Truncation, sample_rollout
from glm_grpo.grpo.advantages import Normalization, group_advantages
from glm_grpo.grpo.losses import reference_penalty
from glm_grpo.training.clock import PhaseClock
from glm_grpo.types import Advantages, Experience, ImageBatch, PromptBatch
from rewards.reweigh import combine
from rewards.score import Scorer
from rewards.types import RewardTable


@dataclass(frozen=True)
class CollectSettings:
    """How experience is made.

    Attributes:
        truncation: Of the sampling distribution.
        combine: How the terms become one reward.
        normalization: Of rewards into advantages.
        std_floor: Smallest divisor, in reward units.
        advantage_clip: Largest absolute advantage; None for no limit.
        reward_kl_coef: Weight of the KL to the reference taken from the reward; 0 when it stands
            in the loss or nowhere.
        micro_batch_size: Sequences the reference scores at once.
    """

    truncation: Truncation
    combine: Literal["weighted_sum", "normalize_then_sum"]
    normalization: Normalization
    std_floor: float
    advantage_clip: float | None
    reward_kl_coef: float
    micro_batch_size: int


@dataclass(frozen=True)
class Stage:
    """The models of a run, and where they are.

    Attributes:
        policy: Samples and is trained.
        decoder: Frozen.
        scorer: All reward terms.
        residency: Moves them in and out.
    """

    policy: Policy
    decoder: Decoder
    scorer: Scorer
    residency: Residency


def collect(
    stage: Stage,
    batch: PromptBatch,
    settings: CollectSettings,
    *,
    policy_step: int,
    clock: PhaseClock,
) -> Experience:
    """Makes the experience of one batch.

    Args:
        stage: Models.
        batch: Prompts and seeds.
        settings: Plain values.
        policy_step: Updates the policy has had.
        clock: Gets the time of every phase.

    Raises:
        RewardError: A term failed; names term, prompt and image.
    """
    with stage.residency.phase("rollout"), clock.phase("rollout"):
        rollout = sample_rollout(
            stage.policy, batch, truncation=settings.truncation, policy_step=policy_step
        )
    images, table = draw_and_score(stage, batch, rollout.token_ids, clock)
    totals = combine(table, mode=settings.combine)
    shape = totals.shape
    experience = Experience(
        prompts=batch,
        rollout=rollout,
        images=images,
        rewards=table,
        totals=totals,
        penalties=torch.zeros(shape),
        advantages=Advantages(torch.zeros(shape), torch.ones(shape[0], dtype=torch.bool)),
    )
    if settings.reward_kl_coef > 0:
        with stage.residency.phase("update"), clock.phase("update"):
            reference = _reference_log_probs(stage.policy, experience, settings.micro_batch_size)
        penalty = reference_penalty(
            rollout.log_probs.flatten(0, 1), reference, kl_coef=settings.reward_kl_coef
        )
        experience = replace(experience, penalties=penalty.unflatten(0, shape))
    advantages = group_advantages(
        totals - experience.penalties,
        normalization=settings.normalization,
        std_floor=settings.std_floor,
        clip=settings.advantage_clip,
    )
    return replace(experience, advantages=advantages)


def draw_and_score(
    stage: Stage, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"], clock: PhaseClock
) -> tuple[ImageBatch, RewardTable]:
    """Decodes prompt by prompt and scores what is drawn, meanwhile where the terms can.

    The phase `reward` is the time the step waits for scores once the last picture is drawn. Terms
    whose networks wait in CPU memory during decoding begin there.

    Raises:
        RewardError: A term failed; names term, prompt and image.
    """
    scoring = stage.scorer.begin(batch.prompts, is_resident=not stage.residency.moves("rewards"))
    groups = []
    with stage.residency.phase("decode"), clock.phase("decode"):
        for group in stage.decoder.decode_groups(batch, token_ids):
            groups.append(group)
            if stage.scorer.is_overlapping:
                scoring.add(group)
    with stage.residency.phase("reward"), clock.phase("reward"):
        if not stage.scorer.is_overlapping:
            for group in groups:
                scoring.add(group)
        table = scoring.finish()
    return ImageBatch(pixels=torch.stack(groups), decode_seeds=batch.decode_seeds), table


def join_tables(tables: Sequence[RewardTable]) -> RewardTable:
    """Tables of the same terms and weights, prompts after prompts."""
    noting = dict.fromkeys(name for table in tables for name in table.notes)
    return replace(
        tables[0],
        raw=torch.cat([table.raw for table in tables]),
        is_applicable=torch.cat([table.is_applicable for table in tables]),
        notes={
            name: tuple(
                group
                for table in tables
                for group in table.notes.get(name, ((),) * len(table.is_applicable))
            )
            for name in noting
        },
    )


def _reference_log_probs(
    policy: Policy, experience: Experience, micro_batch_size: int
) -> Float32[Tensor, "N T"]:
    rows = torch.arange(experience.totals.numel()).split(micro_batch_size)
    return torch.cat([policy.reference_log_probs(experience, part).cpu() for part in rows])
