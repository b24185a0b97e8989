"""A run that is stopped and goes on ends as one that was never stopped."""

from __future__ import annotations

import signal

import pytest

from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from tests.end_to_end.runs import Brightness, read_record, signal_at

# Whatever a run keeps from step to step: moments of the optimizer, a reference that follows, an
# average of the weights, the scale of evaluations, the best step, the decoder that is in use, the
# bands of the canaries, flat groups that were replaced, a schedule that depends on the step.
STATEFUL = (
    *("train.steps=4", "train.eval_every=2", "train.checkpoint_every=1"),
    *("train.minibatches_per_rollout=2", "train.updates_per_rollout=2"),
    *("model.adapter={rank: 4, alpha: 8.0}", "optim.learning_rate=2e-3", "optim.schedule=cosine"),
    *("loss.reference_sync_every=2", "eval.ema_decay=0.5", "reward.combine=normalize_then_sum"),
    *("decode.rollout_steps=1", "decode.recheck_every=2", "rollout.refill_rounds=1"),
    *("anchor.weight=0.5", "anchor.final_weight=0.1", "trackers=[tensorboard]"),
    *("rollout.group_size=2", "train.micro_batch_size=4"),
)


def test_stopped_and_resumed_run_equals_an_uninterrupted_one(make_trainer):
    handler = signal.getsignal(signal.SIGTERM)
    whole, _, whole_dir = make_trainer(*STATEFUL, folder="whole")
    assert whole.run() is not None
    assert signal.getsignal(signal.SIGTERM) is handler

    # After the step at hand: the reference has moved once, and is in the middle of its next turn.
    stopped, _, run_dir = make_trainer(
        *STATEFUL, folder="parts", change_batch=signal_at(3, signal.SIGTERM)
    )
    assert stopped.run() is None
    assert load_checkpoint(newest_checkpoint(RunFolder(run_dir))).step == 3
    last, _, _ = make_trainer(*STATEFUL, "train.resume=auto", folder="parts")
    assert last.run() is not None

    expected = read_record(whole_dir)
    assert read_record(run_dir) == expected
    stems = {name.split("/")[1] for name in expected if name.startswith("step-000004/")}
    assert stems == {"policy", "optimizer", "average", "reference"}
    rows = read_metrics(RunFolder(whole_dir))
    assert rows[-1]["optim/grad_norm"] > 0
    assert rows[-1]["kl/reference"] > 0


def test_a_folder_that_holds_a_run_is_not_written_over(make_trainer):
    trainer, _, _ = make_trainer("train.steps=1", term=Brightness())
    trainer.run()

    with pytest.raises(ConfigError, match="nothing is overwritten"):
        make_trainer(term=Brightness())


def test_resuming_with_other_settings_names_them(make_trainer):
    make_trainer(term=Brightness())

    with pytest.raises(CheckpointError, match=r"loss\.kl_coef"):
        make_trainer("loss.kl_coef=0.5", "train.resume=auto", term=Brightness())
