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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from glm_grpo.errors import HackingError, NonFiniteError, StorageError
from glm_grpo.glm_image.self_check import self_check
from glm_grpo.grpo.update import update_policy
from glm_grpo.report.gallery import update_gallery, write_gallery
from glm_grpo.report.summary import SummaryRow
from glm_grpo.storage import RunFolder
from glm_grpo.training.checkpoint import prune_checkpoints, save_checkpoint
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import Stage, collect
from glm_grpo.training.evaluate import evaluate
from glm_grpo.training.interrupt import stop_on_signal
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.metrics import evaluation_metrics, step_metrics
from glm_grpo.training.optimizer_state import optimizer_to_tensors
from glm_grpo.training.progress import Progress
from glm_grpo.training.progression import LoopSettings, Progression
from glm_grpo.training.recorder import Recorder
from glm_grpo.training.sentinel import Sentinel
from glm_grpo.training.summaries import summarise
from glm_grpo.types import Evaluation, LossReport, PromptBatch
from rewards.canaries import Departure
from rewards.types import RewardError

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3
"""Non-finite updates in a row after which a run stops."""


class Trainer:
    """One run.

    Args:
        stage: The models.
        optimizer: Over the policy's trainable parameters.
        learning_rate: Sets its rate.
        batch_for_step: The prompts of a step, a pure function of its number.
        evaluation_batches: All held-out prompts.
        settings: Plain values.
        folder: Of the run.
        recorder: Writes into it.
        sentinel: Watches for a policy that games its reward.
        progress: Tells the terminal.
        progression: Where the run stands; not at 0 when it resumes.
        backward: Accumulates the gradient of a scalar.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        *,
        batch_for_step: Callable[[int], PromptBatch],
        evaluation_batches: Sequence[PromptBatch],
        settings: LoopSettings,
        folder: RunFolder,
        recorder: Recorder,
        sentinel: Sentinel,
        progress: Progress,
        progression: Progression,
        backward: Callable[[Tensor], None],
    ) -> None:
        self._stage = stage
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self.batch_for_step = batch_for_step
        self._evaluation_batches = evaluation_batches
        self._settings = settings
        self._folder = folder
        self._recorder = recorder
        self._sentinel = sentinel
        self._progress = progress
        self._at = progression
        self._backward = backward

    def run(self) -> list[SummaryRow] | None:
        """Trains to the last step, or to the next one after Ctrl-C or SIGTERM.

        Returns:
            Before against after on the held-out prompts; None when the run was asked to stop
            before its last evaluation.

        Raises:
            NonFiniteError: Loss or gradient was not finite three times in a row.
            HackingError: A canary left its band and the run is to stop then.
            SelfCheckError: Sampling and replay disagree.
            RewardError: A term failed.
            StorageError: The run folder cannot be written.
        """
        try:
            is_finished = self._train()
        except (HackingError, RewardError):
            self._close()
            raise
        summary = self._close()
        return summary if is_finished else None

    def _train(self) -> bool:
        """Steps until the last, or until asked to stop; whether it was the last."""
        with stop_on_signal() as stop, self._progress:
            if self._at.step == 0:
                with self._failure_kept(0):
                    untrained = self._evaluate()
                self._sentinel.learn(untrained)
                self._recorder.record_step(0, evaluation_metrics(untrained))
                update_gallery(self._folder, 0)
            else:
                self._sentinel.restore()
                # What was recorded after the checkpoint is gone, and goes from the pages too.
                write_gallery(self._folder, ())
                self._make_up_for_evaluation()
            is_checked = False
            while self._at.step < self._settings.steps and not stop.is_set:
                with self._failure_kept(self._at.step + 1):
                    self._step(is_checked)
                is_checked = True
            is_finished = self._at.step == self._settings.steps
            if not is_finished:
                self.save()
        return is_finished

    def _close(self) -> list[SummaryRow]:
        """Ends the records with a gallery; before against after."""
        self._recorder.close()
        try:
            summary = summarise(self._folder)
        except StorageError:
            # An evaluation is damaged: the pages say so, and show the rest.
            write_gallery(self._folder, ())
            raise
        write_gallery(self._folder, summary)
        return summary

    @contextmanager
    def _failure_kept(self, step: int) -> Iterator[None]:
        """Where a term fails in a step, saves its pictures and what was learnt before it."""
        try:
            yield
        except RewardError as error:
            done = self._at.step
            if done > 0 and not self._folder.checkpoint_dir(done).exists():
                self.save()
            if error.pictures is None:
                raise
            place = self._recorder.record_failure(error.pictures, step)
            raise RewardError(f"{error}. The pictures are in {place}") from error

    def _step(self, is_checked: bool) -> None:
        """One step of the algorithm, its record, and whatever is due after it."""
        clock = PhaseClock(self._progress.phase)
        step = self._at.step + 1
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        experience = collect(
            self._stage,
            self.batch_for_step(self._at.step),
            self._settings.collect,
            policy_step=self._learning_rate.updates,
            clock=clock,
        )
        with self._stage.residency.phase("update"), clock.phase("update"):
            if not is_checked:
                rows = self._settings.update.micro_batch_size
                report = self_check(self._stage.policy, experience, rows=rows)
                logger.info(
                    "self-check passed: %d tokens a grid, replay gap %.1e nats (largest %.1e)",
                    experience.rollout.token_ids.shape[-1],
                    report.mean_gap,
                    report.max_gap,
                )
            reports = update_policy(
                self._stage.policy,
                self._optimizer,
                self._learning_rate,
                experience,
                self._settings.update,
                self._backward,
            )
        metrics = step_metrics(
            experience,
            reports,
            clock.seconds(),
            _peak_memory_bytes(),
            combine=self._settings.collect.combine,
        )
        watched = self._sentinel.look(experience)
        metrics |= watched.metrics
        self._recorder.record_rollout(experience, step)
        self._recorder.record_step(step, metrics)
        self._at.step = step
        is_best = False
        if self._is_evaluation_due():
            evaluated = evaluation_metrics(self._evaluate())
            self._recorder.amend_step(step, evaluated)
            is_best = self._note_best(evaluated["eval/total"])
            metrics |= evaluated
        update_gallery(self._folder, step)
        self._progress.end(step, metrics)
        self._refuse_non_finite(reports)
        self._checkpoint_if_due(is_best)
        self._stop_if_gamed(watched.departures)

    def _make_up_for_evaluation(self) -> None:
        """Evaluates the step a run resumes from, where a term failed in that evaluation."""
        step = self._at.step
        if not self._is_evaluation_due() or self._folder.evaluation_path(step).exists():
            return
        with self._failure_kept(step):
            evaluated = evaluation_metrics(self._evaluate())
        self._recorder.amend_step(step, evaluated)
        update_gallery(self._folder, step)
        if self._note_best(evaluated["eval/total"]):
            self.save()

    def _is_evaluation_due(self) -> bool:
        step = self._at.step
        return step % self._settings.eval_every == 0 or step == self._settings.steps

    def _evaluate(self) -> Evaluation:
        self._progress.phase("evaluation")
        evaluation = evaluate(
            self._stage, self._evaluation_batches, self._settings.collect, step=self._at.step
        )
        self._recorder.record_evaluation(evaluation)
        self._progress.evaluated(self._at.step, evaluation_metrics(evaluation))
        return evaluation

    def _note_best(self, total: float) -> bool:
        if total <= self._at.best_total:
            return False
        self._at.best_step, self._at.best_total = self._at.step, total
        return True

    def _refuse_non_finite(self, reports: Sequence[LossReport]) -> None:
        for report in reports:
            self._at.skipped_in_a_row = self._at.skipped_in_a_row + 1 if report.is_skipped else 0
            if report.is_skipped:
                logger.warning(
                    "step %d: loss %s, gradient norm %s: the update was skipped",
                    self._at.step,
                    report.total,
                    report.grad_norm,
                )
            if self._at.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise NonFiniteError(
                    f"loss or gradient was not finite in {MAX_SKIPPED_IN_A_ROW} updates in a row "
                    f"(step {self._at.step}); the last checkpoint in "
                    f"{self._folder.checkpoints_dir} is good; lower optim.learning_rate or "
                    "optim.max_grad_norm and resume from it"
                )

    def _stop_if_gamed(self, departures: Sequence[Departure]) -> None:
        if not departures or not self._settings.is_stopping_on_hacking:
            return
        if not self._folder.checkpoint_dir(self._at.step).exists():
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
        tensors, values = optimizer_to_tensors(self._optimizer)
        save_checkpoint(
            self._folder,
            step=self._at.step,
            tensors={"policy": self._stage.policy.state_tensors(), "optimizer": tensors},
            metadata={
                "optimizer": values,
                "updates": self._learning_rate.updates,
                "best_step": self._at.best_step,
                "best_total": None if self._at.best_step is None else self._at.best_total,
                "skipped_in_a_row": self._at.skipped_in_a_row,
            },
        )
        prune_checkpoints(self._folder, self._settings.keep_checkpoints, self._at.best_step)


def _peak_memory_bytes() -> int:
    """Of the accelerator since the step began; without one, of the process since it began."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
