"""Write what a run records into its folder: metrics, tables, images, canaries and the gallery.

Only the main process writes; every process makes the same calls and gets the same answers. A thread
writes the files of a step while the next step runs; at most one step is pending.
`glm_grpo.run.writing` has the files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from glm_grpo.config import Config
from glm_grpo.errors import (
    Aftermath,
    HackingError,
    NonFiniteError,
    aftermath_of,
)
from glm_grpo.grpo.update import UpdateReport
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.summaries import summarise
from glm_grpo.run.tables import SummaryRow, read_base_scores, read_metrics
from glm_grpo.run.trackers import Trackers
from glm_grpo.run.writing import append_metrics, encode, write_evaluation, write_rollout
from glm_grpo.training.collate import join_experiences
from glm_grpo.training.collect import image_advantages
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.evaluate import weigh_evaluation
from glm_grpo.training.metrics import (
    StepWork,
    evaluation_metrics,
    sampled_utilisation,
    step_metrics,
    supervised_metrics,
    supervised_utilisation,
)
from glm_grpo.training.monitors.hacking import HackingMonitor
from glm_grpo.training.out_of_memory import out_of_memory_explained
from glm_grpo.training.phases import PhaseClock
from glm_grpo.training.process_memory import peak_memory_bytes, process_bytes
from glm_grpo.types import Evaluation, EvaluationPart, Experience
from rewards.canaries import Departure, measure_images
from rewards.refusals import find_refusals
from rewards.types import RewardTable

logger = logging.getLogger(__name__)

ShowRun = Callable[[RunFolder, int | None], None]
"""Shows what a run stored up to a step; None: the run resumes or ends."""


@dataclass(frozen=True)
class StepPart:
    """One process's contribution to the record of a step.

    Attributes:
        experience: Experience without its pixels.
        png_files: Its images as PNG files, prompt by prompt.
        measures: Result of `measure_images` for them.
    """

    experience: Experience
    png_files: list[bytes]
    measures: dict[str, Float64[Tensor, " P"]]


@dataclass(frozen=True)
class StepRecord:
    """Result of recording a step or an evaluation.

    Attributes:
        departures: Canaries that have left their band.
    """

    metrics: Mapping[str, float]
    departures: tuple[Departure, ...]


class Records:
    """Records a run in its folder and its trackers, from all its processes.

    Trackers are called from the main thread, to which MLflow binds its run.

    Args:
        open_files: Called in the main process, before anything is written; returns the trackers,
            and the monitor for reward hacking.
        config: How totals and advantages are computed.
        show: Called after a step or an evaluation is stored.
        work: Operations of the models on the run's devices; None: do not record utilisation.
    """

    def __init__(
        self,
        folder: RunFolder,
        processes: Processes,
        open_files: Callable[[], tuple[Trackers, HackingMonitor]],
        *,
        config: Config,
        show: ShowRun,
        work: StepWork | None = None,
    ) -> None:
        self.folder = folder
        self._show = show
        self._work = work
        self._processes = processes
        self._combine, self._advantage = config.reward.combine, config.advantage
        self._base_scores: RewardTable | None = None
        self._thread = ThreadPoolExecutor(1, "records")
        self._unfinished: list[Future[None]] = []
        with processes.together():
            if processes.is_main:
                self._trackers, self._monitor = open_files()

    def begin(self, part: Sequence[EvaluationPart]) -> dict[str, float]:
        """Store the evaluation of step 0, and return its metrics.

        It determines the bands of the canaries and the scale of later evaluations' totals.

        Args:
            part: This process's part of the evaluation, none or one.
        """
        parts = self._joined(part)

        def write() -> dict[str, float]:
            base = self._write_evaluation(parts)
            self._base_scores = base.scores
            self._monitor.learn(base)
            metrics = evaluation_metrics(base) | _time_of(parts)
            append_metrics(self.folder, 0, metrics)
            self._trackers.log(0, metrics)
            self._show(self.folder, 0)
            return metrics

        return self._processes.on_main(write)

    def resume(self) -> None:
        """Resume a run: also remove from the pages what was recorded after the checkpoint."""

        def read() -> None:
            self._monitor.restore()
            if self._combine != "weighted_sum":
                self._base_scores = read_base_scores(self.folder)
            self._show(self.folder, None)

        self._processes.on_main(read)

    def recorded_total(self, step: int) -> float | None:
        """Mean total of the evaluation of `step`, the last one recorded.

        None if there is no evaluation, or its line does not contain the total yet.
        """

        def look() -> float | None:
            if not self.folder.evaluation_path(step).exists():
                return None
            return read_metrics(self.folder)[-1].get("eval/total")

        return self._processes.on_main(look)

    def prepare(self, experience: Experience) -> Future[StepPart]:
        """Start measuring and encoding the images of a step while the policy learns from it."""

        def make() -> StepPart:
            prompts, images = experience.prompts.prompts, experience.images
            measures = measure_images(prompts, images.pixels)
            return StepPart(_to_be_recorded(experience), encode(images), measures)

        return self._thread.submit(make)

    def step(
        self,
        step: int,
        prepared: Future[StepPart],
        updates: Sequence[UpdateReport],
        clock: PhaseClock,
        more: Mapping[str, float],
    ) -> StepRecord:
        """Record a step, after the previous one is stored.

        Args:
            prepared: Result of `prepare` in this process.
            more: Further metrics.
        """
        seconds, begun = clock.seconds(), time.perf_counter()
        with self._processes.together():
            part = prepared.result()
        parts, (peak, held) = self._processes.gather_on_main(part), self._memory()

        def take() -> StepRecord:
            self._wait()
            waited = time.perf_counter() - begun
            whole = _join_step(parts)
            experience, png_files = whole.experience, whole.png_files
            _warn_of_refusals(experience, step)
            reading = self._monitor.measure(step, experience, whole.measures)
            metrics = step_metrics(experience, updates, seconds, peak, combine=self._combine)
            if self._work is not None:
                metrics |= sampled_utilisation(self._work, experience, seconds)
            metrics |= {**reading.metrics, **more}
            metrics |= {"time/records": waited, "memory/process_bytes": held}
            self._trackers.log(step, metrics)
            # Files and trackers have one advantage per image.
            advantages = image_advantages(experience.rewards(), self._advantage)
            stored = replace(experience, advantages=advantages[..., None])
            self._trackers.log_groups(stored, png_files, step)

            def write() -> None:
                write_rollout(self.folder, stored, png_files, step, combine=self._combine)
                append_metrics(self.folder, step, metrics)

            self._write_later(write)
            return StepRecord(metrics, reading.departures)

        return self._processes.on_main(take)

    def supervised_step(
        self, step: int, targets: int, updates: Sequence[UpdateReport], clock: PhaseClock
    ) -> StepRecord:
        """Record the metrics of a step in which nothing was sampled.

        Args:
            targets: Number of target images of this process.
        """
        images, seconds = sum(self._processes.gather(targets)), clock.seconds()
        peak, held = self._memory()

        def take() -> StepRecord:
            self._wait()
            metrics = supervised_metrics(images, updates, seconds, peak)
            if self._work is not None:
                metrics |= supervised_utilisation(self._work, images, seconds)
            metrics |= {"memory/process_bytes": held}
            self._trackers.log(step, metrics)
            self._write_later(lambda: append_metrics(self.folder, step, metrics))
            return StepRecord(metrics, ())

        return self._processes.on_main(take)

    def evaluation(self, part: Sequence[EvaluationPart]) -> StepRecord:
        """Store an evaluation of the step recorded last, after that is stored.

        Args:
            part: This process's part of the evaluation, none or one.
        """
        parts = self._joined(part)

        def write() -> StepRecord:
            self._wait()
            evaluation = self._write_evaluation(parts)
            metrics = evaluation_metrics(evaluation) | _time_of(parts)
            reading = self._monitor.measure_evaluation(evaluation)
            if reading.metrics:
                of_step = read_metrics(self.folder)[-1].get("canary/departures") or 0.0
                departures = of_step + len(reading.departures)
                metrics |= {**reading.metrics, "canary/departures": departures}
            append_metrics(self.folder, evaluation.step, metrics)
            self._trackers.log(evaluation.step, metrics)
            return StepRecord(metrics, reading.departures)

        return self._processes.on_main(write)

    def show(self, step: int) -> None:
        """Start updating the gallery to `step`."""
        if self._processes.is_main:
            self._write_later(lambda: self._show(self.folder, step))

    def finish(self) -> None:
        """Wait until everything recorded so far is stored.

        Raises:
            MemoryLimitError: Memory ran out.
        """
        self._processes.on_main(self._wait)

    def close(self) -> list[SummaryRow]:
        """Finish the records and the gallery; returns held-out scores before and after."""

        def write() -> list[SummaryRow]:
            try:
                self._wait()
            finally:
                self._trackers.close()
            self._show(self.folder, None)
            return summarise(self.folder)

        return self._processes.on_main(write)

    @contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close the records if the inside fails for a reason that ends all processes alike.

        However it ends, the thread writes nothing afterwards.
        """
        try:
            yield
        except Exception as error:
            if self._ends_all(error):
                self.close()
            raise
        else:
            self.finish()
        finally:
            self._thread.shutdown(cancel_futures=True)

    def _ends_all(self, error: Exception) -> bool:
        """Whether all processes see the error; one that fails in an update cannot tell others."""
        failure = self._processes.failure
        if failure is None:
            is_seen = self._processes.count == 1 or isinstance(error, HackingError | NonFiniteError)
            return is_seen and aftermath_of(error) is not Aftermath.UNKNOWN
        return failure.aftermath is not Aftermath.UNKNOWN

    def _write_evaluation(self, parts: Sequence[EvaluationPart]) -> Evaluation:
        """Join and weigh an evaluation, and store it without its metrics."""
        evaluation = weigh_evaluation(parts, mode=self._combine, base_scores=self._base_scores)
        write_evaluation(self.folder, evaluation, combine=self._combine)
        self._trackers.log_evaluation(evaluation)
        return evaluation

    def _memory(self) -> tuple[int, float]:
        """Highest peak of a process since the step began, and what all hold now, in bytes."""
        gather = self._processes.gather
        return max(gather(peak_memory_bytes())), float(sum(gather(process_bytes())))

    def _write_later(self, write: Callable[[], None]) -> None:
        self._unfinished.append(self._thread.submit(write))

    def _wait(self) -> None:
        wait(self._unfinished)
        with out_of_memory_explained("records", "those of the previous step"):
            for written in self._unfinished:
                written.result()
        self._unfinished.clear()

    def _joined(self, part: Sequence[EvaluationPart]) -> list[EvaluationPart]:
        """Parts of all processes, in the main one."""
        return [each for parts in self._processes.gather_on_main([*part]) for each in parts]


def _join_step(parts: Sequence[StepPart]) -> StepPart:
    return StepPart(
        join_experiences([each.experience for each in parts]),
        [png_file for each in parts for png_file in each.png_files],
        {name: torch.cat([each.measures[name] for each in parts]) for name in parts[0].measures},
    )


def _warn_of_refusals(experience: Experience, step: int) -> None:
    for refused in find_refusals(experience.prompts.prompts, experience.scores):
        if refused.count > 0:
            left_out = "their groups" if refused.is_weighted else "its mean"
            logger.warning(
                "step %d: %s; they are left out of %s", step, refused.describe(), left_out
            )


def _time_of(parts: Sequence[EvaluationPart]) -> dict[str, float]:
    """Duration of an evaluation: processes run in parallel, so that of the slowest."""
    return {"time/evaluation": max(each.seconds for each in parts)}


def _to_be_recorded(experience: Experience) -> Experience:
    """Experience without its pixels, and without what only replay needs."""
    pixels = experience.images.pixels
    return replace(
        experience,
        rollout=replace(experience.rollout, sampling_mask=None),
        images=replace(experience.images, pixels=pixels.new_empty(*pixels.shape[:3], 0, 0)),
        reference_log_probs=None,
    )
