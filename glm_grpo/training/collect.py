"""Prompts -> Experience: sample, decode, score, compare inside groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from glm_grpo.grpo.advantages import AdvantageSettings, group_advantages
from glm_grpo.grpo.losses import LossSettings, reference_penalty
from glm_grpo.models.glm_image.decoder import Decoder
from glm_grpo.models.glm_image.offload import Residency
from glm_grpo.models.glm_image.policy import Policy
from glm_grpo.models.glm_image.sampling import Truncation, sample_rollout
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.distributed.processes import ALONE, Team
from glm_grpo.training.out_of_memory import (
    drawing_size,
    out_of_memory_explained,
    replay_size,
    sampling_size,
)
from glm_grpo.types import Advantages, Experience, ImageBatch, PromptBatch, Rollout
from rewards.reweigh import combine
from rewards.score import Scorer
from rewards.types import RewardTable


@dataclass(frozen=True)
class CollectSettings:
    """How experience is made.

    Attributes:
        truncation: Of the sampling distribution.
        combine: How the terms become one reward.
        advantage: Of rewards into advantages.
        loss: Whether a KL to the reference is weighed, and whether in the reward.
        micro_batch_size: Sequences the reference scores at once.
        decode_steps: Denoising steps of what is learnt from, >= 1.
    """

    truncation: Truncation
    combine: Literal["weighted_sum", "normalize_then_sum"]
    advantage: AdvantageSettings
    loss: LossSettings
    micro_batch_size: int
    decode_steps: int


@dataclass(frozen=True)
class Stage:
    """The models of a run, and where they are.

    Attributes:
        policy: Samples and is trained.
        decoder: Frozen; decodes in full, as for evaluations.
        scorer: All reward terms.
        residency: Moves them in and out.
    """

    policy: Policy
    decoder: Decoder
    scorer: Scorer
    residency: Residency

    def with_decode_steps(self, steps: int) -> Stage:
        """The same models, with so many denoising steps."""
        return replace(self, decoder=self.decoder.with_steps(steps))


def collect(
    stage: Stage,
    batch: PromptBatch,
    settings: CollectSettings,
    *,
    policy_step: int,
    clock: PhaseClock,
    team: Team = ALONE,
) -> Experience:
    """Makes the experience of one batch.

    Where several processes each bring a part of a batch, advantages are those of the whole.

    Args:
        stage: Models.
        batch: Prompts and seeds, of this process.
        settings: Plain values.
        policy_step: Updates the policy has had.
        clock: Gets the time of every phase.
        team: The processes that collect together.

    Raises:
        RewardError: A term failed; names term, prompt and image.
        MemoryLimitError: Memory ran out; names phase, size and remedy.
        PeerError: Another process failed.
    """
    with team.together():
        experience = _score_rollout(stage, batch, settings, policy_step=policy_step, clock=clock)
    rewards = team.gather(experience.totals - experience.penalties)
    advantages = group_advantages(
        torch.cat(rewards),
        normalization=settings.advantage.normalization,
        std_floor=settings.advantage.std_floor,
        clip=settings.advantage.clip,
    )
    start = sum(len(part) for part in rewards[: team.rank])
    own = slice(start, start + len(batch.prompts))
    return replace(
        experience, advantages=Advantages(advantages.values[own], advantages.is_flat[own])
    )


def _score_rollout(
    stage: Stage,
    batch: PromptBatch,
    settings: CollectSettings,
    *,
    policy_step: int,
    clock: PhaseClock,
) -> Experience:
    """Samples, draws and scores; advantages are 0 until groups are compared."""
    with (
        out_of_memory_explained("rollout", sampling_size(batch)),
        stage.residency.phase("rollout"),
        clock.phase("rollout"),
    ):
        rollout = sample_rollout(
            stage.policy, batch, truncation=settings.truncation, policy_step=policy_step
        )
    rollout_stage = stage.with_decode_steps(settings.decode_steps)
    reading = _ReferenceReading(stage, batch, rollout, settings.micro_batch_size, clock)
    # While scores are awaited, where the policy need not be brought back for it.
    is_early = settings.loss.kl_coef > 0 and not stage.residency.moves("policy")
    images, table = draw_and_score(
        rollout_stage, batch, rollout.token_ids, clock, meanwhile=reading if is_early else None
    )
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
        reference_log_probs=reading.log_probs,
    )
    kl_coef = settings.loss.kl_coef_in_reward
    if kl_coef > 0:
        penalty = reference_penalty(rollout.log_probs, reading(), kl_coef=kl_coef)
        experience = replace(experience, penalties=penalty, reference_log_probs=reading.log_probs)
    return experience


def draw_and_score(
    stage: Stage,
    batch: PromptBatch,
    token_ids: Int64[Tensor, "P G T"],
    clock: PhaseClock,
    *,
    is_evaluation: bool = False,
    meanwhile: Callable[[], object] | None = None,
) -> tuple[ImageBatch, RewardTable]:
    """Decodes prompt by prompt and scores what is drawn, meanwhile where the terms can.

    The phase `reward` is the time the step waits for scores once the last picture is drawn and
    `meanwhile` is done. Terms whose networks wait in CPU memory during decoding begin there.
    `is_evaluation` chooses what is said where memory runs out.

    Raises:
        RewardError: A term failed; names term, prompt and image.
        MemoryLimitError: Memory ran out; names phase, size and remedy.
    """
    scoring = stage.scorer.begin(batch.prompts, is_resident=not stage.residency.moves("rewards"))
    groups = []
    size = drawing_size(batch)
    with (
        out_of_memory_explained("evaluation" if is_evaluation else "decode", size),
        stage.residency.phase("decode"),
        clock.phase("decode"),
    ):
        for group in stage.decoder.decode_groups(batch, token_ids):
            groups.append(group)
            if stage.scorer.is_overlapping:
                scoring.add(group)
    if meanwhile is not None:
        meanwhile()
    with (
        out_of_memory_explained("evaluation" if is_evaluation else "reward", size),
        stage.residency.phase("reward"),
        clock.phase("reward"),
    ):
        if not stage.scorer.is_overlapping:
            for group in groups:
                scoring.add(group)
        table = scoring.finish()
    return ImageBatch(pixels=torch.stack(groups), decode_seeds=batch.decode_seeds), table


def join_experiences(parts: Sequence[Experience]) -> Experience:
    """Parts of one batch, prompts after prompts, as records need them: without what replay needs.

    Args:
        parts: As `sendable` leaves them.
    """
    first = parts[0]
    return replace(
        first,
        prompts=replace(
            first.prompts,
            prompts=tuple(prompt for part in parts for prompt in part.prompts.prompts),
            decode_seeds=tuple(seed for part in parts for seed in part.prompts.decode_seeds),
        ),
        rollout=replace(
            first.rollout,
            token_ids=torch.cat([part.rollout.token_ids for part in parts]),
            log_probs=torch.cat([part.rollout.log_probs for part in parts]),
        ),
        images=join_images([part.images for part in parts]),
        rewards=join_tables([part.rewards for part in parts]),
        totals=torch.cat([part.totals for part in parts]),
        penalties=torch.cat([part.penalties for part in parts]),
        advantages=Advantages(
            torch.cat([part.advantages.values for part in parts]),
            torch.cat([part.advantages.is_flat for part in parts]),
        ),
    )


def sendable(experience: Experience) -> Experience:
    """What another process needs to record an experience: nothing of what replay alone needs."""
    return replace(
        experience,
        rollout=replace(experience.rollout, is_kept=None),
        reference_log_probs=None,
        correction=None,
    )


def join_images(parts: Sequence[ImageBatch]) -> ImageBatch:
    """Pictures, prompts after prompts."""
    return ImageBatch(
        pixels=torch.cat([part.pixels for part in parts]),
        decode_seeds=tuple(seed for part in parts for seed in part.decode_seeds),
    )


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


class _ReferenceReading:
    """The reference's log-probabilities of a rollout, computed at the first call.

    Attributes:
        log_probs: On the CPU; None before the first call.
    """

    def __init__(
        self,
        stage: Stage,
        batch: PromptBatch,
        rollout: Rollout,
        micro_batch_size: int,
        clock: PhaseClock,
    ) -> None:
        self._stage, self._batch, self._rollout = stage, batch, rollout
        self._micro_batch_size, self._clock = micro_batch_size, clock
        self.log_probs: Float32[Tensor, "P G T"] | None = None

    def __call__(self) -> Float32[Tensor, "P G T"]:
        if self.log_probs is None:
            self.log_probs = self._read()
        return self.log_probs

    def _read(self) -> Float32[Tensor, "P G T"]:
        stage, batch = self._stage, self._batch
        shape = self._rollout.token_ids.shape[:2]
        with (
            out_of_memory_explained("update", replay_size(batch, self._micro_batch_size)),
            stage.residency.phase("update"),
            self._clock.phase("update"),
        ):
            rows = torch.arange(shape.numel()).split(self._micro_batch_size)
            parts = [
                stage.policy.reference_log_probs(batch, self._rollout, part).cpu() for part in rows
            ]
        log_probs: Tensor = torch.cat(parts).unflatten(0, shape)
        return log_probs
