"""Run steps; evaluate, save and stop when it is time.

Each step samples G token grids for each of P prompts, decodes them with the frozen decoder, scores
the images, turns scores into advantages inside each group, and makes clipped, KL-regularised
updates of the policy, `minibatches` of them in each of `epochs_per_rollout` passes: `TrainingStep`
in `step.py`. The first half, up to the advantages, is `collect` in `collect.py`; the second is
`update_policy` in `glm_grpo.grpo.update`.
With `train.method: sft` a step learns the tokens of target images instead, and only evaluations
sample.

Source: DeepSeekMath, Shao et al. 2024 (arXiv 2402.03300), section 4.1.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing, nullcontext

import torch

from glm_grpo.errors import HackingError, NonFiniteUpdateError
from glm_grpo.grpo.update import UpdateReport
from glm_grpo.models.base import lost_weights_remedy
from glm_grpo.run.finding import resume_command
from glm_grpo.run.tables import SummaryRow
from glm_grpo.training.evaluate import evaluate
from glm_grpo.training.interrupt import stop_on_signal
from glm_grpo.training.phases import PhaseClock
from glm_grpo.training.progress import Progress
from glm_grpo.training.records import StepRecord
from glm_grpo.training.saver import CheckpointSaver
from glm_grpo.training.step import TrainingStep
from glm_grpo.types import EvaluationPart, PromptBatch
from rewards.canaries import Departure

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3
"""Stop the run after this many steps in a row without a finite update."""


class Trainer:
    """One run, or one process of it: all processes do the same with their part of the prompts.

    Args:
        step: What is repeated; its config also says when to evaluate, save and stop.
        evaluation_batches: Held-out prompts of this process; the main one has at least one.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        evaluation_batches: Sequence[PromptBatch],
        saver: CheckpointSaver,
        progress: Progress,
    ) -> None:
        self.step = step
        self._state = step.learner.state
        self._evaluation_batches = evaluation_batches
        self._saver = saver
        self._progress = progress

    def run(self) -> list[SummaryRow] | None:
        """Train to the last step, or to the end of the current one on a signal to stop.

        Returns:
            Held-out scores before and after; None if the run was asked to stop before its last
            evaluation.

        Raises:
            NonFiniteError: Loss or gradient was not finite in all updates of three steps in a row,
                or the policy's output is not a distribution.
            DecoderError: The decoder's output is not an image.
            HackingError: A canary left its band, and the run is configured to stop.
            MemoryLimitError: Memory ran out; the message says what is saved.
            CollectorError: A collector failed, or collectors died repeatedly.
            PeerError: Another process of the run failed.
        """
        state, steps = self._state, self.step.config.train.steps
        with (
            self.step.records.closed_on_failure(),
            stop_on_signal() as stop,
            self._progress,
            closing(self.step),
        ):
            self._begin()
            first = state.step + 1
            while state.step < steps and not self.step.processes.any(stop.is_set):
                step = state.step + 1
                with self._saver.saved_on_failure(step):
                    self._take_step(step, is_first=step == first)
            is_finished = state.step == steps
            if not is_finished:
                self._saver.save()
        summary = self.step.records.close()
        return summary if is_finished else None

    def _take_step(self, step: int, *, is_first: bool) -> None:
        clock = PhaseClock(self._progress)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        updates, record = self.step.take(step, clock, is_first=is_first)
        self._saver.finish_step(step)
        metrics, departures, is_best = record.metrics, record.departures, False
        if self._is_evaluation_due():
            evaluated = self._record_evaluation()
            is_best = self._state.note_best(evaluated.metrics["eval/total"])
            metrics = {**metrics, **evaluated.metrics}
            departures += evaluated.departures
        self.step.records.show(step)
        self._progress.end(step, metrics)
        self._refuse_non_finite(updates)
        if is_best or self._is_checkpoint_due():
            self._saver.save()
        self._stop_on_hacking(departures)

    def _begin(self) -> None:
        """Evaluate the base policy, or resume the run."""
        step = self._state.step
        if step == 0:
            with self._saver.saved_on_failure(0):
                metrics = self.step.records.begin(self._evaluate())
            self._progress.evaluated(0, metrics)
            return
        self.step.records.resume()
        if not self._is_evaluation_due():
            return
        recorded = self.step.records.recorded_total(step)
        if recorded is not None:
            # A run that was killed before saving may have recorded it already.
            if self._state.note_best(recorded):
                self._saver.save()
            return
        # A term failed in that evaluation.
        with self._saver.saved_on_failure(step):
            evaluated = self._record_evaluation()
        self.step.records.show(step)
        if self._state.note_best(evaluated.metrics["eval/total"]):
            self._saver.save()
        self._stop_on_hacking(evaluated.departures)

    def _is_evaluation_due(self) -> bool:
        step, train = self._state.step, self.step.config.train
        return step % train.eval_every == 0 or step == train.steps

    def _is_checkpoint_due(self) -> bool:
        step, train = self._state.step, self.step.config.train
        return step % train.checkpoint_every == 0 or step == train.steps

    def _record_evaluation(self) -> StepRecord:
        record = self.step.records.evaluation(self._evaluate())
        self._progress.evaluated(self._state.step, record.metrics)
        return record

    def _evaluate(self) -> list[EvaluationPart]:
        """Evaluate this process's prompts; empty if there are fewer prompts than processes."""
        self._progress.phase("evaluation")
        learner = self.step.learner
        weights = nullcontext() if learner.average is None else learner.average.in_place()
        with learner.strategy.full_parameters(), weights, self.step.processes.together():
            if not self._evaluation_batches:
                return []
            return [
                evaluate(
                    self.step.models,
                    self._evaluation_batches,
                    step=self._state.step,
                    display=self._progress,
                )
            ]

    def _refuse_non_finite(self, updates: Sequence[UpdateReport]) -> None:
        state, skipped = self._state, [report for report in updates if report.is_skipped]
        for report in skipped if self.step.processes.is_main else ():
            logger.warning(
                "step %d: loss %s, gradient norm %s: the update was skipped",
                state.step,
                report.loss,
                report.grad_norm,
            )
        # If one update of a rollout leaves the weights unchanged, the others do too: count steps.
        is_lost = len(skipped) == len(updates) > 0
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if is_lost else 0
        if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self._saver.save_since(state.step - state.skipped_in_a_row)
            raise NonFiniteUpdateError(
                "loss or gradient was not finite in any update of "
                f"{state.skipped_in_a_row} steps in a row; "
                f"{lost_weights_remedy(self.step.models.policy.dtype)}"
            )

    def _stop_on_hacking(self, departures: Sequence[Departure]) -> None:
        if not departures or self.step.config.reward.on_hacking != "stop":
            return
        if not self._saver.is_saved():
            self._saver.save()
        again = resume_command(self.step.records.folder.path, "reward.on_hacking=warn")
        raise HackingError(
            f"step {self._state.step}: {'; '.join(map(Departure.describe, departures))}. The "
            "policy may be gaming the reward (reward.on_hacking is stop); everything is saved. "
            "Look at images/ and the gallery; change the weights, or continue with "
            f"{again}"
        )
