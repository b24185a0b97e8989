"""What is kept where a step fails: the step before it, and the pictures a term could not score."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from glm_grpo.errors import (
    CollectorError,
    DecoderError,
    MemoryLimitError,
    NonFiniteError,
    PeerError,
)
from glm_grpo.run.folder import RunFolder
from glm_grpo.training.checkpoint.files import newest_checkpoint
from glm_grpo.training.checkpoint.run_state import Progression
from glm_grpo.training.distributed.processes import ALONE, Team
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.out_of_memory import out_of_memory_explained
from glm_grpo.training.recording.recorder import store_failure
from rewards.types import RewardError

_HARMLESS = (CollectorError, DecoderError, MemoryLimitError, RewardError)
"""Errors after which the policy of the last finished step is as good as ever."""
_NOTED = (*_HARMLESS, NonFiniteError, PeerError)


class FailureKeeper:
    """Saves what was learnt before a step that fails.

    From the optimizer's first write in a step on, the weights are those of no finished step, and
    nothing is saved under its number: whether all updates of a rollout or half of one were made.

    Args:
        folder: Of the run.
        progression: The last finished step.
        optimizer: Tells when it begins to write.
        learning_rate: Counts updates, also those that leave the weights alone.
        save: Writes a checkpoint of the last finished step.
        team: The processes of the run. What one of several fails at alone cannot be saved: that
            takes all of them.
    """

    def __init__(
        self,
        folder: RunFolder,
        progression: Progression,
        *,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        save: Callable[[], None],
        team: Team = ALONE,
    ) -> None:
        self._folder = folder
        self._at = progression
        self._save = save
        self._team = team
        self._learning_rate = learning_rate
        self._updates = learning_rate.updates
        self._is_writing = False
        optimizer.register_step_pre_hook(self._note_update)

    def finish_step(self) -> None:
        """The weights are those of the finished step again."""
        self._updates = self._learning_rate.updates
        self._is_writing = False

    @contextmanager
    def kept(self, step: int) -> Iterator[None]:
        """Where a term, the decoder, memory or the policy fails inside, keeps what there is.

        The error goes on with notes of what that is.

        Args:
            step: At work inside.

        Raises:
            MemoryLimitError: Memory ran out inside.
            NonFiniteError: The policy is lost; nothing is saved, an earlier checkpoint is named.
            DecoderError: The decoder failed inside.
            CollectorError: Collectors failed; another start may do better.
            RewardError: A term failed inside. Its pictures are stored, none are in the error.
            PeerError: Another process of the run failed.
        """
        try:
            with out_of_memory_explained("records", f"those of step {step}"), self._team.watched():
                yield
        except _NOTED as error:
            if isinstance(error, DecoderError | NonFiniteError):
                error.args = (f"step {step}: {error}",)
            error.add_note(self._keep(error))
            if isinstance(error, RewardError) and error.pictures is not None:
                place = store_failure(self._folder, error.pictures, step)
                error.pictures = None
                error.add_note(f"The pictures are in {place}")
            raise

    def _keep(self, error: Exception) -> str:
        """Saves what was learnt where that is worth it and can be done; says what is there."""
        kind = type(error).__name__
        if self._team.size > 1:
            if self._team.failure is None:
                # The others are in the middle of the update, and are ended by the launcher.
                return self._name_newest(before=None)
            kind = self._team.failure.kind
        if kind in [each.__name__ for each in _HARMLESS]:
            return self._keep_finished_step()
        is_lost = kind == NonFiniteError.__name__
        return self._name_newest(before=self._at.step if is_lost else None)

    def _keep_finished_step(self) -> str:
        """Saves the last finished step if it is not saved yet; says what can be gone on with."""
        done = self._at.step
        go_on = f"go on with train.resume={self._folder.path}"
        if done == 0:
            return "Nothing was learnt yet"
        if not self._team.on_main(self._folder.checkpoint_dir(done).exists):
            if self._is_writing or self._learning_rate.updates != self._updates:
                newest = newest_checkpoint(self._folder)
                place = "there is no checkpoint" if newest is None else f"{go_on}: {newest.name}"
                return f"The weights of step {done} had begun to change and are not saved; {place}"
            with out_of_memory_explained("records", f"the checkpoint of step {done}"):
                self._save()
        return f"Step {done} is saved; {go_on}"

    def _name_newest(self, before: int | None) -> str:
        """Names the newest checkpoint, or the newest whose weights are not those at hand."""
        if self._at.step == 0:
            return "Nothing was learnt yet"
        newest = newest_checkpoint(self._folder, before=before)
        if newest is None:
            return f"There is no checkpoint from before step {self._at.step}"
        return f"The last checkpoint from before is {newest.name}: train.resume={newest}"

    def _note_update(self, *_: object) -> None:
        self._is_writing = True
