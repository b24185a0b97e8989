"""What the main process keeps of a run: tables, pictures, canaries, the gallery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glm_grpo.errors import StorageError
from glm_grpo.gallery import update_gallery, write_gallery
from glm_grpo.gallery.summary import SummaryRow
from glm_grpo.grpo.update import UpdateReport
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_untrained
from glm_grpo.training.evaluate import weigh_evaluation
from glm_grpo.training.metrics import evaluation_metrics, step_metrics
from glm_grpo.training.monitors.hacking import Sentinel
from glm_grpo.training.recording.recorder import Recorder
from glm_grpo.training.recording.summaries import summarise
from glm_grpo.types import EvaluationPart, Experience
from rewards.audit.canaries import Departure
from rewards.reweigh import Mode
from rewards.types import RewardTable


@dataclass(frozen=True)
class StepCosts:
    """What a step took.

    Attributes:
        seconds: By phase, and `step` for the whole.
        peak_memory_bytes: Of the process that took most.
    """

    seconds: Mapping[str, float]
    peak_memory_bytes: int


@dataclass(frozen=True)
class StepRecord:
    """What was made of a step.

    Attributes:
        metrics: As stored.
        departures: Canaries that left their band.
    """

    metrics: dict[str, float]
    departures: tuple[Departure, ...]


class Records:
    """The run folder of a run, one writer.

    Args:
        folder: Of the run.
        recorder: Writes into it.
        sentinel: Watches for a policy that games its reward.
        combine: How the terms are combined into totals.
    """

    def __init__(
        self, folder: RunFolder, recorder: Recorder, sentinel: Sentinel, *, combine: Mode
    ) -> None:
        self._folder = folder
        self._recorder = recorder
        self._sentinel = sentinel
        self._combine = combine
        self._untrained: RewardTable | None = None

    def begin(self, parts: Sequence[EvaluationPart]) -> dict[str, float]:
        """Stores the evaluation of step 0; its metrics.

        It gives the canaries their bands, and the totals of later evaluations their scale.
        """
        untrained = weigh_evaluation(parts, mode=self._combine, untrained=None)
        self._untrained = untrained.rewards
        self._recorder.record_evaluation(untrained)
        self._sentinel.learn(untrained)
        metrics = evaluation_metrics(untrained)
        self._recorder.record_step(0, metrics)
        update_gallery(self._folder, 0)
        return metrics

    def resume(self) -> None:
        """Takes up a run: what was recorded after the checkpoint goes from the pages too.

        Raises:
            StorageError: What step 0 left, and later steps are held against, cannot be read.
        """
        self._sentinel.restore()
        if self._combine == "normalize_then_sum":
            self._untrained = read_untrained(self._folder)
        write_gallery(self._folder, ())

    def lacks_evaluation(self, step: int) -> bool:
        """Whether there is none of `step`, the last recorded, or its line does not have it yet."""
        if not self._folder.evaluation_path(step).exists():
            return True
        return "eval/total" not in read_metrics(self._folder)[-1]

    def step(
        self,
        step: int,
        experience: Experience,
        reports: Sequence[UpdateReport],
        costs: StepCosts,
        more: Mapping[str, float],
    ) -> StepRecord:
        """Stores a step.

        Args:
            step: From 1.
            experience: Of all processes.
            reports: One for each update.
            costs: Time and memory.
            more: Further metrics.
        """
        metrics = step_metrics(
            experience,
            reports,
            costs.seconds,
            costs.peak_memory_bytes,
            combine=self._combine,
        )
        watched = self._sentinel.look(experience)
        metrics |= {**watched.metrics, **more}
        self._recorder.record_rollout(experience, step)
        self._recorder.record_step(step, metrics)
        return StepRecord(metrics, watched.departures)

    def evaluation(self, parts: Sequence[EvaluationPart]) -> dict[str, float]:
        """Stores an evaluation beside the step recorded last; its metrics."""
        evaluation = weigh_evaluation(parts, mode=self._combine, untrained=self._untrained)
        self._recorder.record_evaluation(evaluation)
        metrics = evaluation_metrics(evaluation)
        self._recorder.amend_step(evaluation.step, metrics)
        return metrics

    def show(self, step: int) -> None:
        """Brings the gallery up to `step`."""
        update_gallery(self._folder, step)

    def close(self) -> list[SummaryRow]:
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
