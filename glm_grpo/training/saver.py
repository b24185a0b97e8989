"""Save a run: when it is due, when the run is asked to stop, and before a failure ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from glm_grpo.errors import Aftermath, DecoderError, NonFiniteError, aftermath_of
from glm_grpo.run.checkpoints import (
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from glm_grpo.run.finding import resume_command
from glm_grpo.run.folder import RunFolder, step_of
from glm_grpo.run.optimizer_state import optimizer_to_tensors
from glm_grpo.run.writing import store_failure
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.learner import RunLearner
from glm_grpo.training.out_of_memory import out_of_memory_explained
from rewards.types import RewardError


class CheckpointSaver:
    """Writes the checkpoints of a run; every process makes the same calls.

    From the optimizer's first write in a step until its last update, the weights belong to no
    finished step, so nothing is saved.

    Args:
        learner: Learner to save; its state has the last finished step.
        processes: Processes of the run. If only one of several fails, nothing can be saved, because
            saving takes all of them.
        keep: Number of newest checkpoints to keep; the best by evaluation is kept in addition.
        finish_records: Called before saving, because a checkpoint implies that its steps are
            recorded.
        announce: Called when saving begins.
    """

    def __init__(
        self,
        folder: RunFolder,
        learner: RunLearner,
        *,
        processes: Processes,
        keep: int,
        finish_records: Callable[[], object],
        announce: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._learner = learner
        self._state = learner.state
        self._processes = processes
        self._keep = keep
        self._finish_records = finish_records
        self._announce = announce
        self._updates = learner.learning_rate.updates
        self._is_writing = False
        learner.optimizer.register_step_pre_hook(self._note_update)

    def save(self) -> None:
        """Write a checkpoint of the last finished step, and remove those no longer kept."""
        self._finish_records()
        self._announce("checkpoint")
        state, scale = self._state, self._learner.strategy.loss_scale
        moments, values = optimizer_to_tensors(self._learner.optimizer)
        tensors = {
            "policy": self._learner.strategy.policy_tensors(),
            "optimizer": self._learner.strategy.gather_full(moments),
        }
        reference = self._learner.strategy.reference_tensors()
        if reference:
            tensors["reference"] = reference
        if self._learner.average is not None:
            tensors["average"] = dict(self._learner.average.tensors())
        metadata = {
            "optimizer": values,
            "updates": self._learner.learning_rate.updates,
            "best_step": state.best_step,
            "best_total": None if state.best_step is None else state.best_total,
            "skipped_in_a_row": state.skipped_in_a_row,
            "canaries_outside": state.canaries_outside,
            "loss_scale": [scale.value, scale.finite_updates],
        }
        if state.start_step is not None:
            metadata["start_step"] = state.start_step

        def write() -> None:
            save_checkpoint(self._folder, step=state.step, tensors=tensors, metadata=metadata)
            prune_checkpoints(self._folder, self._keep, state.best_step)

        self._processes.on_main(write)

    def is_saved(self) -> bool:
        """Whether the last finished step has a checkpoint."""
        return self._processes.on_main(self._folder.checkpoint_dir(self._state.step).exists)

    def save_since(self, step: int) -> None:
        """Save the last finished step, unless `step`, after which no weight changed, is saved."""
        newest = self._processes.on_main(lambda: newest_checkpoint(self._folder))
        if step > 0 and (newest is None or (step_of(newest) or 0) < step):
            self.save()

    def finish_step(self, step: int) -> None:
        """Mark a step as finished: all its updates are done and its records handed over."""
        self._state.step = step
        self._updates = self._learner.learning_rate.updates
        self._is_writing = False

    @contextmanager
    def saved_on_failure(self, step: int) -> Iterator[None]:
        """Save the trained weights if a term, the decoder, memory or the policy fails inside.

        The error is raised again with notes on what is saved.

        Args:
            step: Step being worked on inside.

        Raises:
            MemoryLimitError: Memory ran out inside.
            NonFiniteError: The policy is lost; nothing is saved, but an earlier checkpoint is
                named.
            NonFiniteUpdateError: The weights before the failed update are saved and named.
            DecoderError: The decoder failed inside.
            CollectorError: Collectors failed; restarting may help.
            PeerError: Another process of the run failed.
        """
        try:
            with (
                out_of_memory_explained("records", f"those of step {step}"),
                self._processes.watched(),
            ):
                yield
        except Exception as error:
            aftermath = aftermath_of(error)
            if aftermath in (Aftermath.UNKNOWN, Aftermath.EXPLAINED):
                raise
            if isinstance(error, DecoderError | NonFiniteError):
                error.args = (f"step {step}: {error}",)
            error.add_note(self._save_after(aftermath))
            if isinstance(error, RewardError) and error.images is not None:
                place = store_failure(self._folder, error.images, step)
                error.images = None
                error.add_note(f"The images are in {place}")
            raise

    def _save_after(self, aftermath: Aftermath) -> str:
        """Save the trained weights if this is useful and possible; returns what is saved."""
        if self._processes.count > 1:
            if self._processes.failure is None:
                # The others are in the middle of the update; the launcher will end them.
                return self._name_newest(before=None)
            aftermath = self._processes.failure.aftermath
        if aftermath is Aftermath.INTACT:
            return self._save_finished_step()
        is_lost = aftermath is Aftermath.LOST
        return self._name_newest(before=self._state.step if is_lost else None)

    def _save_finished_step(self) -> str:
        """Save the last finished step unless it is saved; returns how to continue."""
        done = self._state.step
        go_on = f"continue with {resume_command(self._folder.path)}"
        if done == 0:
            return "Nothing was learned yet"
        if not self.is_saved():
            if self._is_writing or self._learner.learning_rate.updates != self._updates:
                newest = newest_checkpoint(self._folder)
                place = "there is no checkpoint" if newest is None else f"{go_on}: {newest.name}"
                return f"The weights of step {done} had begun to change and are not saved; {place}"
            with out_of_memory_explained("records", f"the checkpoint of step {done}"):
                self.save()
        return f"Step {done} is saved; {go_on}"

    def _name_newest(self, before: int | None) -> str:
        """Name the newest checkpoint, or the newest with other weights than the current ones."""
        if self._state.step == 0:
            return "Nothing was learned yet"
        newest = newest_checkpoint(self._folder, before=before)
        if newest is None:
            return f"There is no checkpoint from before step {self._state.step}"
        return f"The last checkpoint from before is {newest.name}: {resume_command(newest)}"

    def _note_update(self, *_: object) -> None:
        self._is_writing = True
