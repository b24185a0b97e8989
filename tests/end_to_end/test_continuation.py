"""A run that is stopped and goes on ends as one that was never stopped."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
import torch

from glm_grpo.errors import CheckpointError, NonFiniteError, StorageError
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.checkpoint.files import load_checkpoint, newest_checkpoint
from rewards.score import Scorer, Term

RUN = ("train.steps=4", "train.eval_every=2", "train.checkpoint_every=2")


def compared(run_dir):
    """All metrics that do not depend on the clock or on memory."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/", "memory/"))}
        for row in read_metrics(RunFolder(run_dir))
    ]


def signal_at(step, number):
    """Sends this process a signal as the batch of a step is asked for."""

    def change(batch_for_step):
        def asked(at):
            if at == step:
                os.kill(os.getpid(), number)
            return batch_for_step(at)

        return asked

    return change


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_and_resumed_run_equals_an_uninterrupted_one(make_trainer, number):
    whole, _, whole_dir = make_trainer(*RUN, folder="whole")
    assert whole.run() is not None

    first, _, run_dir = make_trainer(*RUN, folder="parts", change_batch=signal_at(2, number))
    assert first.run() is None
    newest = newest_checkpoint(RunFolder(run_dir))
    assert newest is not None
    assert load_checkpoint(newest).step == 3

    second, _, _ = make_trainer(*RUN, "train.resume=auto", folder="parts")
    assert second.run() is not None

    assert compared(run_dir) == compared(whole_dir)
    ours, theirs = (load_checkpoint(newest_checkpoint(RunFolder(d))) for d in (run_dir, whole_dir))
    for stem in ("policy", "optimizer"):
        for name, tensor in theirs.tensors[stem].items():
            assert torch.equal(ours.tensors[stem][name], tensor), name


STATEFUL = (
    "rollout.prompts_per_step=2",
    "train.steps=3",
    "train.eval_every=3",
    "train.checkpoint_every=1",
    "train.minibatches_per_rollout=2",
    "model.adapter={rank: 4, alpha: 8.0}",
    "optim.learning_rate=2e-3",
    "loss.reference_sync_every=1",
    "eval.ema_decay=0.5",
)


@pytest.mark.usefixtures("cached_rollouts")
def test_resumed_run_has_the_average_and_the_reference_it_had(make_trainer):
    whole, _, whole_dir = make_trainer(*STATEFUL, folder="whole")
    assert whole.run() is not None
    stopped = signal_at(0, signal.SIGINT)
    first, _, run_dir = make_trainer(*STATEFUL, folder="parts", change_batch=stopped)
    assert first.run() is None

    second, _, _ = make_trainer(*STATEFUL, "train.resume=auto", folder="parts")
    assert second.run() is not None

    assert compared(run_dir) == compared(whole_dir)
    ours, theirs = (load_checkpoint(newest_checkpoint(RunFolder(d))) for d in (run_dir, whole_dir))
    assert {*theirs.tensors} == {"policy", "optimizer", "average", "reference"}
    for stem, tensors in theirs.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(ours.tensors[stem][name], tensor), name
    # The KL to a reference that follows is that of one step.
    rows = read_metrics(RunFolder(run_dir))
    assert 0 < rows[-1]["kl/reference"] < 0.1


def test_signal_handlers_are_restored_after_a_run(make_trainer):
    before = signal.getsignal(signal.SIGTERM)
    trainer, _, _ = make_trainer("train.steps=1")

    trainer.run()

    assert signal.getsignal(signal.SIGTERM) is before


def test_a_folder_that_holds_a_run_is_not_written_over(make_trainer):
    trainer, _, _ = make_trainer("train.steps=1")
    trainer.run()

    with pytest.raises(StorageError, match="holds a run already"):
        make_trainer("train.steps=1")


def test_resuming_with_other_settings_names_them(make_trainer):
    make_trainer("train.steps=1")

    with pytest.raises(CheckpointError, match=r"loss\.kl_coef"):
        make_trainer("train.steps=1", "loss.kl_coef=0.5", "train.resume=auto")


class Brightness:
    """Scores pictures by their brightness."""

    def applies_to(self, prompt):
        return True

    def score(self, prompts, pixels):
        return pixels.float().mean(dim=(1, 2, 3))

    def modules(self):
        return ()


@pytest.mark.usefixtures("cached_rollouts")
def test_non_finite_updates_are_skipped_and_three_in_a_row_stop_the_run(make_trainer):
    def use_term(models):
        return dataclasses.replace(models, scorer=Scorer([Term("brightness", Brightness(), 1.0)]))

    trainer, models, run_dir = make_trainer(
        "train.steps=9", "train.checkpoint_every=1", "advantage.clip=null", change_stage=use_term
    )
    batch_for_step = trainer.source.batch_for_step
    update = models.policy.replay

    def break_at_two(step):
        if step == 2:

            def broken(prompts, rollout, rows):
                replay = update(prompts, rollout, rows)
                return dataclasses.replace(replay, log_probs=replay.log_probs * torch.nan)

            models.policy.replay = broken
        return batch_for_step(step)

    trainer.source.batch_for_step = break_at_two

    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        trainer.run()

    rows = read_metrics(RunFolder(run_dir))
    assert [row["optim/skipped_updates"] for row in rows[1:]] == [0, 0, 1, 1, 1]
    newest = newest_checkpoint(RunFolder(run_dir))
    assert newest is not None
    tensors = load_checkpoint(newest).tensors["policy"]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
