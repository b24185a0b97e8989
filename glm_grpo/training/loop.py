"""The algorithm: GRPO on the AR policy of an AR-plus-diffusion model.

Each step samples G token grids for each of P prompts, draws them with the frozen decoder, scores
them, turns scores into advantages inside each group, and takes `updates_per_rollout` clipped,
KL-regularised updates of the policy. Everything around that is bookkeeping: evaluation on held-out
prompts, the run folder, checkpoints.

Source: DeepSeekMath, Shao et al. 2024 (arXiv 2402.03300), section 4.1.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping, Sequence
from contextlib import closing

import torch
from torch.optim import Optimizer

from glm_grpo.errors import (
    CollectorError,
    DecoderError,
    HackingError,
    MemoryLimitError,
    NonFiniteError,
    PeerError,
)
from glm_grpo.gallery.summary import SummaryRow
from glm_grpo.grpo.update import UpdateReport, update_policy
from glm_grpo.models.glm_image.self_check import self_check
from glm_grpo.run.folder import RunFolder
from glm_grpo.training.checkpoint.files import prune_checkpoints, save_checkpoint
from glm_grpo.training.checkpoint.optimizer_state import optimizer_to_tensors
from glm_grpo.training.checkpoint.run_state import LoopSettings, Progression
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import Stage, join_experiences, sendable
from glm_grpo.training.distributed.processes import OnMain, Team
from glm_grpo.training.distributed.strategy import Engine
from glm_grpo.training.evaluate import evaluate
from glm_grpo.training.failures import FailureKeeper
from glm_grpo.training.interrupt import stop_on_signal
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.monitors.recheck import Recheck
from glm_grpo.training.out_of_memory import out_of_memory_explained, replay_size
from glm_grpo.training.process_memory import process_bytes
from glm_grpo.training.recording.progress import Progress
from glm_grpo.training.recording.records import Records, StepCosts, StepRecord
from glm_grpo.training.sources import ExperienceSource
from glm_grpo.types import EvaluationPart, Experience, PromptBatch
from rewards.audit.canaries import Departure
from rewards.types import RewardError

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3
"""Non-finite updates in a row after which a run stops."""

_CLOSED_AFTER = (
    CollectorError,
    DecoderError,
    HackingError,
    MemoryLimitError,
    NonFiniteError,
    RewardError,
)
"""Errors after which trackers and gallery are brought to an end."""


class Trainer:
    """One run, or one process of it: all processes do the same, each on its part of the prompts.

    Args:
        stage: The models.
        optimizer: Over the policy's trainable parameters.
        learning_rate: Sets its rate.
        source: Gives each step its experience.
        evaluation_batches: The held-out prompts of this process; the main one has at least one.
        settings: Plain values.
        folder: Of the run.
        records: Written by the main process.
        recheck: Watches the decode of rollouts.
        progress: Tells the terminal.
        progression: Where the run stands; not at 0 when it resumes.
        engine: Joins the gradients of the processes.
        team: The processes.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        *,
        source: ExperienceSource,
        evaluation_batches: Sequence[PromptBatch],
        settings: LoopSettings,
        folder: RunFolder,
        records: OnMain[Records],
        recheck: Recheck,
        progress: Progress,
        progression: Progression,
        engine: Engine,
        team: Team,
    ) -> None:
        self._stage = stage
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self.source = source
        self._evaluation_batches = evaluation_batches
        self._settings = settings
        self._folder = folder
        self._records = records
        self._recheck = recheck
        self._progress = progress
        self._at = progression
        self._engine = engine
        self._team = team
        self._failures = FailureKeeper(
            folder,
            progression,
            optimizer=optimizer,
            learning_rate=learning_rate,
            save=self.save,
            team=team,
        )

    def run(self) -> list[SummaryRow] | None:
        """Trains to the last step, or to the next one after Ctrl-C or SIGTERM.

        Returns:
            Before against after on the held-out prompts; None when the run was asked to stop
            before its last evaluation.

        Raises:
            NonFiniteError: Loss or gradient was not finite three times in a row, or the policy
                draws from what is no distribution.
            DecoderError: The decoder drew what is no picture.
            HackingError: A canary left its band and the run is to stop then.
            SelfCheckError: Sampling and replay disagree.
            RewardError: A term failed.
            MemoryLimitError: Memory ran out; says what is saved.
            StorageError: The run folder cannot be written.
            CollectorError: A collector failed, or collectors died again and again.
            PeerError: Another process of the run failed.
        """
        try:
            is_finished = self._train()
        except (*_CLOSED_AFTER, PeerError) as error:
            if self._ends_with_all(error):
                self._records(Records.close)
            raise
        summary = self._records(Records.close)
        return summary if is_finished else None

    def _ends_with_all(self, error: Exception) -> bool:
        """Whether every process of the run ends now, for a reason after which records are closed.

        One that fails in the middle of an update cannot tell the others.
        """
        failure = self._team.failure
        if failure is not None:
            return failure.kind in {each.__name__ for each in _CLOSED_AFTER}
        return self._team.size == 1 or isinstance(error, (HackingError, NonFiniteError))

    def _train(self) -> bool:
        """Steps until the last, or until asked to stop; whether it was the last."""
        with stop_on_signal() as stop, self._progress, closing(self.source):
            if self._at.step == 0:
                with self._failures.kept(0):
                    untrained = self._evaluate()
                metrics = self._records(lambda kept: kept.begin(untrained))
                self._progress.evaluated(0, metrics)
            else:
                self._records(Records.resume)
                self._make_up_for_evaluation()
            is_checked = False
            while self._at.step < self._settings.steps and not self._team.any(stop.is_set):
                with self._failures.kept(self._at.step + 1):
                    self._step(is_checked)
                is_checked = True
            is_finished = self._at.step == self._settings.steps
            if not is_finished:
                self.save()
        return is_finished

    def _step(self, is_checked: bool) -> None:
        """One step of the algorithm, its record, and whatever is due after it."""
        clock = PhaseClock(self._progress.phase)
        step = self._at.step + 1
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        taken = self.source.take(step, clock)
        experience = taken.experience
        rechecked = self._recheck.look(experience, step, clock)
        if not is_checked:
            self._check(experience)
        reports = self._learn(experience, clock)
        self.source.learnt(step)
        record = self._record(step, experience, reports, clock, {**rechecked, **taken.metrics})
        self._at.step = step
        self._failures.finish_step()
        metrics, is_best = record.metrics, False
        if self._is_evaluation_due():
            evaluated = self._record_evaluation()
            is_best = self._note_best(evaluated["eval/total"])
            metrics |= evaluated
        self._records(lambda kept: kept.show(step))
        self._progress.end(step, metrics)
        self._refuse_non_finite(reports)
        self._checkpoint_if_due(is_best)
        self._stop_if_gamed(record.departures)

    def _check(self, experience: Experience) -> None:
        """Sampling and replay must agree before anything is learnt."""
        rows = self._settings.update.micro_batch_size
        with (
            self._engine.whole_weights(),
            self._team.together(),
            out_of_memory_explained("update", replay_size(experience.prompts, rows)),
            self._stage.residency.phase("update"),
        ):
            report = self_check(self._stage.policy, experience, rows=rows)
        logger.info(
            "self-check passed: %d tokens a grid, replay gap %.1e nats (largest %.1e)",
            experience.rollout.token_ids.shape[-1],
            report.mean_gap,
            report.max_gap,
        )

    def _learn(self, experience: Experience, clock: PhaseClock) -> list[UpdateReport]:
        """The updates of a step; the same reports in every process."""
        rows = self._settings.update.micro_batch_size
        with (
            out_of_memory_explained("update", replay_size(experience.prompts, rows)),
            self._stage.residency.phase("update"),
            clock.phase("update"),
        ):
            return update_policy(
                self._stage.policy,
                self._optimizer,
                self._learning_rate,
                experience,
                self._settings.update,
                self._engine,
            )

    def _record(
        self,
        step: int,
        experience: Experience,
        reports: Sequence[UpdateReport],
        clock: PhaseClock,
        more: Mapping[str, float],
    ) -> StepRecord:
        """Stores the experience of all processes."""
        parts = self._team.gather_on_main(sendable(experience))
        costs = StepCosts(clock.seconds(), max(self._team.gather(_peak_memory_bytes())))
        held = {"memory/process_bytes": float(sum(self._team.gather(process_bytes())))}
        return self._records(
            lambda kept: kept.step(step, join_experiences(parts), reports, costs, {**more, **held})
        )

    def _make_up_for_evaluation(self) -> None:
        """Evaluates the step a run resumes from, where a term failed in that evaluation."""
        step = self._at.step
        if not self._is_evaluation_due():
            return
        if not self._records(lambda kept: kept.lacks_evaluation(step)):
            return
        with self._failures.kept(step):
            evaluated = self._record_evaluation()
        self._records(lambda kept: kept.show(step))
        if self._note_best(evaluated["eval/total"]):
            self.save()

    def _is_evaluation_due(self) -> bool:
        step = self._at.step
        return step % self._settings.eval_every == 0 or step == self._settings.steps

    def _record_evaluation(self) -> dict[str, float]:
        """Evaluates and stores the step at hand; its metrics."""
        parts = self._evaluate()
        metrics = self._records(lambda kept: kept.evaluation(parts))
        self._progress.evaluated(self._at.step, metrics)
        return metrics

    def _evaluate(self) -> list[EvaluationPart]:
        """Of every process in the main one; of this process in the others."""
        self._progress.phase("evaluation")
        own = []
        with self._engine.whole_weights(), self._team.together():
            if self._evaluation_batches:
                batches, step = self._evaluation_batches, self._at.step
                own.append(evaluate(self._stage, batches, self._settings.collect, step=step))
        return [part for parts in self._team.gather_on_main(own) for part in parts]

    def _note_best(self, total: float) -> bool:
        if total <= self._at.best_total:
            return False
        self._at.best_step, self._at.best_total = self._at.step, total
        return True

    def _refuse_non_finite(self, reports: Sequence[UpdateReport]) -> None:
        for report in reports:
            self._at.skipped_in_a_row = self._at.skipped_in_a_row + 1 if report.is_skipped else 0
            if report.is_skipped and self._team.is_main:
                logger.warning(
                    "step %d: loss %s, gradient norm %s: the update was skipped",
                    self._at.step,
                    report.metrics["loss/total"],
                    report.metrics["optim/grad_norm"],
                )
            if self._at.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise NonFiniteError(
                    f"loss or gradient was not finite in {MAX_SKIPPED_IN_A_ROW} updates in a row; "
                    "in a new run lower optim.learning_rate or optim.max_grad_norm"
                )

    def _stop_if_gamed(self, departures: Sequence[Departure]) -> None:
        if not departures or not self._settings.is_stopping_on_hacking:
            return
        if not self._team.on_main(self._folder.checkpoint_dir(self._at.step).exists):
            self.save()
        raise HackingError(
            f"step {self._at.step}: {'; '.join(map(Departure.describe, departures))}. The policy "
            "may be gaming the reward (reward.on_hacking is stop); everything is saved. Look at "
            "images/ and the gallery; change the weights, or go on with reward.on_hacking=warn "
            f"train.resume={self._folder.path}"
        )

    def _checkpoint_if_due(self, is_best: bool) -> None:
        settings, step = self._settings, self._at.step
        if is_best or step % settings.checkpoint_every == 0 or step == settings.steps:
            self.save()

    def save(self) -> None:
        """Writes a checkpoint of the step at hand and removes those no longer kept."""
        self._progress.phase("checkpoint")
        moments, values = optimizer_to_tensors(self._optimizer)
        tensors = {
            "policy": self._engine.policy_tensors(),
            "optimizer": self._engine.whole(moments),
        }
        metadata = {
            "optimizer": values,
            "updates": self._learning_rate.updates,
            "best_step": self._at.best_step,
            "best_total": None if self._at.best_step is None else self._at.best_total,
            "skipped_in_a_row": self._at.skipped_in_a_row,
            "full_decode_from": self._at.full_decode_from,
        }

        def write() -> None:
            save_checkpoint(self._folder, step=self._at.step, tensors=tensors, metadata=metadata)
            prune_checkpoints(self._folder, self._settings.keep_checkpoints, self._at.best_step)

        self._team.on_main(write)


def _peak_memory_bytes() -> int:
    """Of the accelerator since the step began; without one, of the process since it began."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
