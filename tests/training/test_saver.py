import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm_grpo.errors import (
    MemoryLimitError,
    NonFiniteError,
    PeerError,
    StorageError,
    aftermath_of,
)
from glm_grpo.grpo.learning_rate import LearningRate
from glm_grpo.grpo.loss_scale import LossScale
from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.run_state import RunState
from glm_grpo.terminal import explain
from glm_grpo.training.distributed.processes import ALONE, Failure, Processes
from glm_grpo.training.distributed.strategy import AccelerateStrategy
from glm_grpo.training.learner import RunLearner
from glm_grpo.training.saver import CheckpointSaver
from rewards.types import RewardError
from tests.factories import NoPolicy


class OneWeight(AccelerateStrategy):
    """The tensors of a policy of one weight."""

    def __init__(self, weight):
        self._weight = weight
        self.loss_scale = LossScale()

    def reference_tensors(self):
        return {}

    def policy_tensors(self):
        return {"weight": self._weight}

    def gather_full(self, tensors):
        return dict(tensors)


def make_saver(
    folder, state, weight, optimizer, learning_rate, *, processes=ALONE, finish_records=lambda: None
):
    """Saves a policy of one weight."""
    return CheckpointSaver(
        folder,
        RunLearner(
            policy=NoPolicy(),
            optimizer=optimizer,
            learning_rate=learning_rate,
            strategy=OneWeight(weight),
            state=state,
        ),
        processes=processes,
        keep=100,
        finish_records=finish_records,
        announce=lambda _: None,
    )


@pytest.fixture
def run(tmp_path):
    """A run of one weight that has finished step 7, whose checkpoints `saver` saves."""
    folder = RunFolder(tmp_path)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    learning_rate = LearningRate(
        optimizer, peak=1.0, schedule="constant", warmup_updates=0, total_updates=100
    )
    state = RunState(step=7)

    saver = make_saver(folder, state, weight, optimizer, learning_rate)
    return SimpleNamespace(
        folder=folder,
        saver=saver,
        weight=weight,
        optimizer=optimizer,
        learning_rate=learning_rate,
        at=state,
    )


def _named_in(message):
    """The checkpoint or run that a message says how to continue from; None if it names none."""
    found = re.search(r"glm-grpo train train\.resume=(\S+?)[.:]?(?: |$)", message)
    return None if found is None else Path(found[1])


def _fail_in(run, step):
    with pytest.raises(MemoryLimitError) as caught, run.saver.saved_on_failure(step):
        raise MemoryError
    return explain(caught.value)


def test_the_finished_step_is_saved_where_memory_runs_out(run):
    message = _fail_in(run, 8)
    assert re.search("records phase.* step 8", message)
    assert _named_in(message) == run.folder.path
    assert load_checkpoint(newest_checkpoint(run.folder)).step == 7


def test_nothing_is_saved_before_the_first_step(run):
    run.at.step = 0
    assert _named_in(_fail_in(run, 1)) is None
    assert newest_checkpoint(run.folder) is None


def test_nothing_is_saved_from_the_first_write_of_the_optimizer_to_the_end_of_the_step(run):
    run.optimizer.step()
    assert _named_in(_fail_in(run, 8)) is None
    assert newest_checkpoint(run.folder) is None
    run.saver.finish_step(8)
    assert _named_in(_fail_in(run, 9)) == run.folder.path
    assert newest_checkpoint(run.folder) == run.folder.checkpoint_dir(8)


def test_an_update_that_left_the_weights_alone_counts_as_begun(run):
    # Its number and learning rate are no longer those of step 7.
    run.learning_rate.step()
    assert _named_in(_fail_in(run, 8)) is None
    assert newest_checkpoint(run.folder) is None


def test_the_newest_checkpoint_is_named_where_the_finished_step_cannot_be_saved(run):
    run.at.step = 5
    run.saver.save()
    run.at.step = 7
    run.optimizer.step()
    message = _fail_in(run, 8)
    assert _named_in(message) == run.folder.path
    assert message.endswith("step-000005")


def test_no_checkpoint_is_made_of_a_step_whose_records_are_not_stored(run):
    def fail():
        raise StorageError("disk full")

    saver = make_saver(
        *(run.folder, run.at, run.weight, run.optimizer, run.learning_rate), finish_records=fail
    )
    with pytest.raises(StorageError, match="disk full"):
        saver.save()
    assert newest_checkpoint(run.folder) is None


def test_a_finished_step_that_is_saved_is_not_written_again(run):
    run.saver.save()
    run.optimizer.step()
    assert _named_in(_fail_in(run, 8)) == run.folder.path
    saved = load_checkpoint(newest_checkpoint(run.folder))
    assert saved.tensors["policy"]["weight"] == 0


def test_memory_that_runs_out_while_saving_says_so(run):
    def fail():
        raise MemoryError

    run.saver.save = fail
    assert re.search("records phase.* step 7", _fail_in(run, 8))


def test_images_a_term_refused_are_kept(run):
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(RewardError) as caught, run.saver.saved_on_failure(8):
        raise RewardError("unreadable", images=images)
    message = explain(caught.value)
    assert message.startswith("RewardError: unreadable. ")
    assert _named_in(message) == run.folder.path
    assert message.endswith(f" {run.folder.path / 'failures' / 'step-000008'}")
    assert load_checkpoint(newest_checkpoint(run.folder)).step == 7


def test_a_term_that_fails_without_images_says_what_is_saved(run):
    with pytest.raises(RewardError) as caught, run.saver.saved_on_failure(8):
        raise RewardError("gone")
    assert _named_in(explain(caught.value)) == run.folder.path
    assert caught.value.images is None
    assert not run.folder.failures_dir.exists()


def _hears_of(run, error):
    """What a process of two says that is told what the other one failed at, or lost it."""
    processes = Processes(rank=0, count=2)
    if error is not None:
        processes.failure = Failure(rank=1, message="told", aftermath=aftermath_of(error))
    saver = make_saver(
        run.folder, run.at, run.weight, run.optimizer, run.learning_rate, processes=processes
    )
    with pytest.raises(PeerError) as caught, saver.saved_on_failure(8):
        raise PeerError("process 1 of 2 failed")
    return explain(caught.value)


def test_the_finished_step_is_saved_where_it_is_as_good_as_ever_in_all_processes(run):
    assert _named_in(_hears_of(run, RewardError("unreadable"))) == run.folder.path
    assert load_checkpoint(newest_checkpoint(run.folder)).step == 7


@pytest.mark.parametrize("error", [TypeError(), None])
def test_nothing_is_saved_for_another_process_that_saves_nothing(run, error):
    """A process that is gone cannot take part either."""
    run.saver.save()
    run.at.step = 8
    assert _named_in(_hears_of(run, error)) == run.folder.checkpoint_dir(7)
    assert not run.folder.checkpoint_dir(8).exists()


@pytest.mark.parametrize(("error", "named"), [(StorageError(), 7), (NonFiniteError(), 6)])
def test_the_checkpoint_at_hand_is_named_unless_its_weights_are_lost(run, error, named):
    run.at.step = 6
    run.saver.save()
    run.at.step = 7
    run.saver.save()
    assert _named_in(_hears_of(run, error)) == run.folder.checkpoint_dir(named)
