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
from glm_grpo.training.learner import RunLearner
from glm_grpo.training.models import Models
from glm_grpo.training.monitors.recheck import recheck_decode
from glm_grpo.training.out_of_memory import describe_replay
from glm_grpo.training.phases import PhaseClock
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


@dataclass(kw_only=True)
class TrainingStep:
    """What a run repeats.

    Attributes:
        config: `train.method` says whether rewards or target images are learned from.
        prompts: Training prompts, of which each process takes its part.
        collectors: Where experience comes from; None: this process makes it.
    """

    config: Config
    models: Models
    learner: RunLearner
    prompts: PromptSource
    records: Records
    processes: Processes
    collectors: Collectors | None = None

    def take(
        self, step: int, clock: PhaseClock, *, is_first: bool
    ) -> tuple[list[UpdateReport], StepRecord]:
        """Learn, and hand in the records.

        Args:
            is_first: Whether it is the first one of this process.
        """
        if self.config.train.method == "sft":
            return self._learn_from_targets(step, clock)
        return self._learn_from_rewards(step, clock, is_first=is_first)

    def close(self) -> None:
        """End the collectors, if there are any."""
        if self.collectors is not None:
            self.collectors.close()

    def _learn_from_rewards(
        self, step: int, clock: PhaseClock, *, is_first: bool
    ) -> tuple[list[UpdateReport], StepRecord]:
        """One step of GRPO: collect experience, check it, learn from it."""
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

    def _learn_from_targets(
        self, step: int, clock: PhaseClock
    ) -> tuple[list[UpdateReport], StepRecord]:
        """One step of supervised fine-tuning: every process learns from its target images."""
        train = self.config.train
        with self.processes.together():
            part = self._own_part(build_batch(self.config, self.prompts, step))
            targets = tokenize_targets(
                self.models,
                encode_sources(self.models, part, clock),
                weight=1.0,
                preview=self.config.sft.preview,
                clock=clock,
            )
        work = describe_replay(targets.prompts, self.models.policy, train.micro_batch_size)
        with self.models.phase("update", work, clock):
            updates = update_on_targets(self.learner, targets, train, num_prompts=len(part.prompts))
        if self.learner.average is not None:
            self.learner.average.update(step)
        num_targets = len(targets.prompt_indices)
        return updates, self.records.supervised_step(step, num_targets, updates, clock)

    def _collect(self, step: int, clock: PhaseClock) -> Experience:
        """Sample, decode and score this process's part of a step's prompts."""
        spares = None
        with self.processes.together():
            part = self._own_part(build_batch(self.config, self.prompts, step))
            if self.config.rollout.dynamic_sampling_rounds > 0:
                spares = build_spares(self.config, self.prompts, step)
        with self.learner.strategy.full_parameters():
            return collect(
                self.models,
                part,
                self.config,
                clock=clock,
                processes=self.processes,
                spares=spares,
            )

    def _own_part(self, whole: PromptBatch) -> PromptBatch:
        return part_of_batch(whole, self.processes.part(len(whole.prompts)))

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
        config, rows = self.config, self.config.train.micro_batch_size
        work = describe_replay(experience.prompts, self.models.policy, rows)
        with self.models.phase("update", work, clock):
            return update_policy(
                self.learner, experience, config.loss, config.train, targets, clock.count
            )

    def _follow_with_reference(self, step: int) -> None:
        every = self.config.loss.reference_sync_steps
        if self.config.needs_reference and every is not None and step % every == 0:
            self.models.policy.reference.mix(self.config.loss.reference_mixup_alpha)
