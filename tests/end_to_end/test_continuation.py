"""A run that is stopped and goes on ends as one that was never stopped."""

from __future__ import annotations

import pickle
import shutil
import signal

import pytest

from glm_grpo.config import compose_config
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.lock import RunLock
from glm_grpo.run.resume import find_resumed
from glm_grpo.run.summaries import base_means
from glm_grpo.run.tables import read_metrics
from glm_grpo.setup.collectors import collector_setup
from glm_grpo.setup.learner import build_learner
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.setup.start import find_start
from tests.end_to_end.runs import read_record, signal_at
from tests.factories import Brightness

# Whatever a run keeps from step to step: moments of the optimizer, a reference that follows, an
# average of the weights, the scale of evaluations, the best step, the decoder that is in use, the
# bands of the canaries, zero-std groups that were replaced, a schedule that depends on the step.
STATEFUL = (
    *("train.steps=4", "train.eval_every=2", "train.checkpoint_every=1"),
    *("train.minibatches=2", "train.epochs_per_rollout=2"),
    *("model.adapter={rank: 4, alpha: 8.0}", "optim.learning_rate=2e-3", "optim.schedule=cosine"),
    *("loss.reference_sync_steps=2", "eval.ema_decay=0.5", "reward.combine=normalize_then_sum"),
    *("decode.rollout_steps=1", "decode.recheck_every=2", "rollout.dynamic_sampling_rounds=1"),
    *("sft.weight=0.5", "sft.final_weight=0.1", "trackers=[tensorboard]"),
    *("rollout.group_size=2", "train.micro_batch_size=4"),
)


def test_stopped_and_resumed_run_equals_an_uninterrupted_one(make_trainer):
    handler = signal.getsignal(signal.SIGTERM)
    whole, _, whole_dir = make_trainer(*STATEFUL, folder="whole")
    assert whole.run() is not None
    assert signal.getsignal(signal.SIGTERM) is handler

    # After the step at hand: the reference has moved once, and is in the middle of its next turn.
    stopped, _, run_dir = make_trainer(
        *STATEFUL, folder="parts", change_step=signal_at(3, signal.SIGTERM)
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


def test_a_run_begins_with_the_weights_of_another_one_and_goes_on_with_them(
    make_trainer, configs_dir
):
    # All weights, whose reference no checkpoint keeps: it is read from the other run again.
    small = ("rollout.group_size=2", "optim.learning_rate=1e-3", "train.checkpoint_every=1")
    sft = (*small, "train.method=sft", "train.steps=1")
    first, _, first_dir = make_trainer(*sft, folder="first", term=Brightness())
    first.run()
    more = (*small, "train.steps=2", "train.eval_every=2", f"model.start_from={first_dir}")
    whole, _, whole_dir = make_trainer(*more, folder="whole", term=Brightness())
    whole.run()
    stopped, _, run_dir = make_trainer(
        *more, folder="parts", term=Brightness(), change_step=signal_at(1, signal.SIGINT)
    )
    assert stopped.run() is None
    assert "reference" not in load_checkpoint(newest_checkpoint(RunFolder(run_dir))).tensors
    resumed, _, _ = make_trainer(*more, "train.resume=auto", folder="parts", term=Brightness())
    assert resumed.run() is not None
    assert read_record(run_dir) == read_record(whole_dir)

    before, after = read_metrics(RunFolder(first_dir))
    base, one, two = read_metrics(RunFolder(whole_dir))
    assert base["eval/brightness"] == pytest.approx(after["eval/brightness"], abs=1e-5)
    means = base_means(RunFolder(whole_dir))
    assert means["brightness"] == pytest.approx(before["eval/brightness"])
    # The reference is what the run began with.
    assert one["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert two["kl/reference"] > 1e-6

    given = [f"model.start_from={first_dir}", "model.adapter={rank: 4, alpha: 8.0}"]
    with pytest.raises(ConfigError, match=r"(?s)model.start_from.*model.adapter = None"):
        find_start(compose_config(configs_dir, "tiny", given))
    misspelt = [f"model.start_from={first_dir.parent / 'frist'}"]
    with pytest.raises(CheckpointError, match=f"did you mean {first_dir}"):
        find_start(compose_config(configs_dir, "tiny", misspelt))


def test_collectors_of_a_resumed_run_do_not_read_the_start_that_its_checkpoint_replaces(
    make_trainer,
):
    small = ("rollout.group_size=2", "model.adapter={rank: 4, alpha: 8.0}")
    sft = (*small, "train.method=sft", "train.steps=1", "optim.learning_rate=1e-3")
    first, _, first_dir = make_trainer(*sft, folder="first", term=Brightness())
    first.run()
    more = (*small, "train.steps=2", f"model.start_from={first_dir}")
    stopped, before, run_dir = make_trainer(
        *more, folder="parts", term=Brightness(), change_step=signal_at(1, signal.SIGINT)
    )
    assert stopped.run() is None
    shutil.rmtree(first_dir)

    config = compose_config(None, None, [f"train.resume={run_dir}"])
    prepared = prepare(config, resumed=find_resumed(config, RunLock()))
    models = prepared.load()
    build_learner(prepared, models)
    # As Ray sends it to another process.
    setup = pickle.loads(pickle.dumps(collector_setup(prepared, models)))
    reference = setup.make_models(setup.config).policy.reference.tensors()
    expected = before.policy.reference.tensors()
    assert expected
    assert all(reference[name].equal(tensor) for name, tensor in expected.items())
