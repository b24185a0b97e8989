"""One step of training: of GRPO on rewards, or of supervised fine-tuning on target images."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from glm_grpo.config.sections import AnchorSection
from glm_grpo.data.prompts import prompts_at
from glm_grpo.grpo.update import (
    UpdateReport,
    UpdateSettings,
    update_on_targets,
    update_policy,
)
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.learner import Learner
from glm_grpo.training.monitors.recheck import Recheck
from glm_grpo.training.phase import Models, PhaseClock, replay_size
from glm_grpo.training.records import Records, StepRecord
from glm_grpo.training.replay_check import check_replay
from glm_grpo.training.sources import ExperienceSource
from glm_grpo.training.targets import TargetSource, sft_weight, tokenize_targets
from glm_grpo.types import Experience, TargetTokens

logger = logging.getLogger(__name__)


@runtime_checkable
class Step(Protocol):
    """What the loop repeats; learns, and hands in the records of what it did."""

    @property
    def source(self) -> ExperienceSource | TargetSource:
        """What it learns from; closed by the loop."""
        ...

    def take(
        self, step: int, clock: PhaseClock, *, is_first: bool
    ) -> tuple[list[UpdateReport], StepRecord]:
        """Take a step.

        Args:
            step: From 1.
            clock: Records the seconds of every phase.
            is_first: Whether it is the first one of this process.
        """
        ...


@dataclass(frozen=True)
class StepSettings:
    """How a step learns.

    Attributes:
        steps: Total number of training steps.
        update: Settings for training the policy on an experience.
        sft_term: Settings of the SFT term, added to the loss of GRPO.
        reference_mix: Weight of the policy in the new reference at each sync.
        reference_sync_every: Steps between syncs of the reference with the policy; None: never.
    """

    steps: int
    update: UpdateSettings
    sft_term: AnchorSection
    reference_mix: float = 1.0
    reference_sync_every: int | None = None


@dataclass
class RewardStep:
    """One step of GRPO; a `Step`.

    Attributes:
        models: Policy, decoder and reward terms.
        learner: Optimizer, learning rate, state and average of the policy.
        source: Gives each step its experience.
        recheck: Compares the cheap decode of rollouts with the full one.
        settings: Plain values.
        records: What the run stores.
        processes: Processes of the run.
    """

    models: Models
    learner: Learner
    source: ExperienceSource
    recheck: Recheck
    settings: StepSettings
    records: Records
    processes: Processes

    def take(
        self, step: int, clock: PhaseClock, *, is_first: bool
    ) -> tuple[list[UpdateReport], StepRecord]:
        """See `Step`."""
        # Sample -> decode -> score -> advantages.
        experience, of_source = self.source.next_experience(step, clock)
        prepared = self.records.prepare(experience)
        of_decode = self.recheck.compare(experience, step, clock)
        if is_first:
            self._check_replay(experience, clock)
        updates = self._update_policy(experience, self._targets(experience, step, clock), clock)
        if self.learner.average is not None:
            self.learner.average.update(step)
        self._follow_with_reference(step)
        self.source.policy_updated(step)
        clock.announce("records")
        record = self.records.step(step, prepared, updates, clock, {**of_decode, **of_source})
        return updates, record

    def _check_replay(self, experience: Experience, clock: PhaseClock) -> None:
        """Check that sampling and replay agree before anything is learned."""
        rows, policy = self.settings.update.micro_batch_size, self.models.policy
        clock.announce("self-check")
        with (
            self.learner.strategy.full_parameters(),
            self.processes.together(),
            self.models.phase("update", replay_size(experience.prompts, policy, rows)),
        ):
            report = check_replay(policy, experience, rows=rows)
        logger.info(
            "self-check passed: %d tokens per grid, replay gap %.1e nats (largest %.1e)",
            experience.rollout.token_ids.shape[-1],
            report.mean_gap,
            report.max_gap,
        )

    def _targets(self, experience: Experience, step: int, clock: PhaseClock) -> TargetTokens | None:
        """Target images of the step, if its loss has an SFT term."""
        settings = self.settings.sft_term
        if not settings.is_used:
            return None
        with self.processes.together():
            return tokenize_targets(
                self.models,
                prompts_at(experience.prompts, experience.trained_rows()),
                weight=sft_weight(settings, step, self.settings.steps),
                preview=settings.preview,
                clock=clock,
            )

    def _update_policy(
        self, experience: Experience, targets: TargetTokens | None, clock: PhaseClock
    ) -> list[UpdateReport]:
        """Run the updates of a step; every process gets the same reports."""
        rows, policy = self.settings.update.micro_batch_size, self.models.policy
        with self.models.phase("update", replay_size(experience.prompts, policy, rows), clock):
            return update_policy(
                self.learner.trainee(policy), experience, self.settings.update, targets, clock.count
            )

    def _follow_with_reference(self, step: int) -> None:
        every = self.settings.reference_sync_every
        if every is not None and step % every == 0:
            self.models.policy.mix_reference(self.settings.reference_mix)


@dataclass
class SupervisedStep:
    """One step of supervised fine-tuning (`train.method: sft`); a `Step`.

    Attributes:
        models: Policy, decoder and reward terms.
        learner: Optimizer, learning rate, state and average of the policy.
        source: Gives each step the target images to learn from.
        settings: Plain values.
        records: What the run stores.
    """

    models: Models
    learner: Learner
    source: TargetSource
    settings: StepSettings
    records: Records

    def take(
        self, step: int, clock: PhaseClock, *, is_first: bool
    ) -> tuple[list[UpdateReport], StepRecord]:
        """See `Step`."""
        del is_first
        targets, num_prompts = self.source.next_targets(step, clock)
        settings, policy = self.settings.update, self.models.policy
        size = replay_size(targets.prompts, policy, settings.micro_batch_size)
        with self.models.phase("update", size, clock):
            updates = update_on_targets(
                self.learner.trainee(policy), targets, settings, num_prompts=num_prompts
            )
        if self.learner.average is not None:
            self.learner.average.update(step)
        return updates, self.records.supervised_step(step, len(targets.places), updates, clock)
