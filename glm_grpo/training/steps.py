"""One step of training: of GRPO on rewards, or of supervised fine-tuning on target images."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from glm_grpo.config import Config
from glm_grpo.data.prompts import PromptSource, part_of_batch, prompts_at
from glm_grpo.grpo.update import UpdateReport, update_on_targets, update_policy
from glm_grpo.training.batches import build_batch, build_spares
from glm_grpo.training.collect import collect
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.generate import encode_sources
from glm_grpo.training.learner import Learner
from glm_grpo.training.models import Models, PhaseClock, describe_replay
from glm_grpo.training.monitors.recheck import recheck_decode
from glm_grpo.training.records import Records, StepRecord
from glm_grpo.training.replay_check import check_replay
from glm_grpo.training.targets import sft_weight, tokenize_targets
from glm_grpo.types import Experience, PromptBatch, TargetTokens

logger = logging.getLogger(__name__)


@runtime_checkable
class Collectors(Protocol):
    """Other processes that collect while this one learns; each step is taken once, in order."""

    def next_experience(
        self, step: int, clock: PhaseClock
    ) -> tuple[Experience, Mapping[str, float]]:
        """Wait for the experience of a step.

        Args:
            step: Step after the last finished one, from 1.
            clock: Records the seconds of every phase, wherever it ran.

        Returns:
            Experience to train on, and metrics of the collectors by name.

        Raises:
            RewardError: A term failed; the message names term, prompt and image.
            GlmGrpoError: The experience cannot be made.
        """
        ...

    def policy_updated(self, step: int) -> None:
        """Notify the collectors that the updates of a step are done."""
        ...

    def close(self) -> None:
        """Stop; no more experience is needed."""
        ...


@dataclass
class RewardStep:
    """One step of GRPO.

    Attributes:
        learner: Optimizer, learning rate, state and average of the policy.
        processes: Processes of the run, each of which has its part of the prompts.
        collectors: Where experience comes from; None: this process makes it.
    """

    config: Config
    models: Models
    learner: Learner
    prompts: PromptSource
    records: Records
    processes: Processes
    collectors: Collectors | None = None

    def take(
        self, step: int, clock: PhaseClock, *, is_first: bool
    ) -> tuple[list[UpdateReport], StepRecord]:
        """Collect, learn, and hand in the records.

        Args:
            is_first: Whether it is the first one of this process.
        """
        metrics: dict[str, float] = {}
        if self.collectors is None:
            experience = self._collect(step, clock)
        else:
            experience, of_collectors = self.collectors.next_experience(step, clock)
            metrics.update(of_collectors)
        prepared = self.records.prepare(experience)
        metrics |= recheck_decode(self.models, experience, step, self.config, clock, self.processes)
        if is_first:
            self._check_replay(experience, clock)
        updates = self._update_policy(experience, self._targets(experience, step, clock), clock)
        if self.learner.average is not None:
            self.learner.average.update(step)
        self._follow_with_reference(step)
        if self.collectors is not None:
            self.collectors.policy_updated(step)
        clock.announce("records")
        return updates, self.records.step(step, prepared, updates, clock, metrics)

    def batch_for_step(self, step: int) -> PromptBatch:
        """Prompts of a step, from 1, of all processes."""
        return build_batch(self.config, self.prompts, step)

    def close(self) -> None:
        """End the collectors."""
        if self.collectors is not None:
            self.collectors.close()

    def _collect(self, step: int, clock: PhaseClock) -> Experience:
        """Sample, decode and score this process's part of a step's prompts."""
        processes, spares = self.processes, None
        with processes.together():
            whole = self.batch_for_step(step)
            if self.config.rollout.dynamic_sampling_rounds > 0:
                spares = build_spares(self.config, self.prompts, step)
        with self.learner.strategy.full_parameters():
            return collect(
                self.models,
                part_of_batch(whole, processes.part(len(whole.prompts))),
                self.config,
                clock=clock,
                processes=processes,
                spares=spares,
            )

    def _check_replay(self, experience: Experience, clock: PhaseClock) -> None:
        """Check that sampling and replay agree before anything is learned."""
        size, policy = self.config.train.micro_batch_size, self.models.policy
        clock.announce("self-check")
        with (
            self.learner.strategy.full_parameters(),
            self.processes.together(),
            self.models.phase("update", describe_replay(experience.prompts, policy, size)),
        ):
            report = check_replay(policy, experience.prompts, experience.rollout, rows=size)
        logger.info(
            "self-check passed: %d tokens per grid, sampling and replay differ by %s",
            experience.rollout.token_ids.shape[-1],
            report.describe(),
        )

    def _targets(self, experience: Experience, step: int, clock: PhaseClock) -> TargetTokens | None:
        """Target images of the step, if its loss has an SFT term."""
        sft = self.config.sft
        if not sft.is_used:
            return None
        with self.processes.together():
            return tokenize_targets(
                self.models,
                prompts_at(experience.prompts, experience.trained_groups()),
                weight=sft_weight(sft, step, self.config.train.steps),
                preview=sft.preview,
                clock=clock,
            )

    def _update_policy(
        self, experience: Experience, targets: TargetTokens | None, clock: PhaseClock
    ) -> list[UpdateReport]:
        """Run the updates of a step; every process gets the same reports."""
        config, policy = self.config, self.models.policy
        trainee = self.learner.trainee(policy, config.optim.max_grad_norm)
        work = describe_replay(experience.prompts, policy, config.train.micro_batch_size)
        with self.models.phase("update", work, clock):
            return update_policy(
                trainee, experience, config.loss, config.train, targets, clock.count
            )

    def _follow_with_reference(self, step: int) -> None:
        every = self.config.loss.reference_sync_steps
        if self.config.needs_reference and every is not None and step % every == 0:
            self.models.policy.mix_reference(self.config.loss.reference_mixup_alpha)


@dataclass
class SupervisedStep:
    """One step of supervised fine-tuning (`train.method: sft`); attributes as in `RewardStep`."""

    config: Config
    models: Models
    learner: Learner
    prompts: PromptSource
    records: Records
    processes: Processes

    def take(
        self, step: int, clock: PhaseClock, *, is_first: bool
    ) -> tuple[list[UpdateReport], StepRecord]:
        """Learn from target images, and hand in the records; arguments as in `RewardStep`."""
        del is_first
        train, policy = self.config.train, self.models.policy
        with self.processes.together():
            whole = self.batch_for_step(step)
            part = part_of_batch(whole, self.processes.part(len(whole.prompts)))
            targets = tokenize_targets(
                self.models,
                encode_sources(self.models, part, clock),
                weight=1.0,
                preview=self.config.sft.preview,
                clock=clock,
            )
        trainee = self.learner.trainee(policy, self.config.optim.max_grad_norm)
        work = describe_replay(targets.prompts, policy, train.micro_batch_size)
        with self.models.phase("update", work, clock):
            updates = update_on_targets(trainee, targets, train, num_prompts=len(part.prompts))
        if self.learner.average is not None:
            self.learner.average.update(step)
        return updates, self.records.supervised_step(
            step, len(targets.prompt_indices), updates, clock
        )

    def batch_for_step(self, step: int) -> PromptBatch:
        """Prompts of a step, from 1, of all processes."""
        return build_batch(self.config, self.prompts, step)

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""
