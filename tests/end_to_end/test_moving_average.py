"""eval.ema_decay: evaluations, best checkpoint and exports are of the averaged weights."""

from __future__ import annotations

import signal

import pytest
import torch

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.checkpoint.files import load_checkpoint
from glm_grpo.training.checkpoint.resume import find_checkpoint
from tests.end_to_end.test_continuation import signal_at

pytestmark = pytest.mark.usefixtures("cached_rollouts")

RUN = (
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "train.steps=4",
    "train.eval_every=2",
    "train.checkpoint_every=1",
    "train.keep_checkpoints=9",
    "optim.learning_rate=1e-3",
)
DECAY = 0.75


def policies(run_dir):
    """The weights of each step, and the averages beside them; those of step 1 come first."""
    checkpoints = [load_checkpoint(RunFolder(run_dir).checkpoint_dir(step)) for step in range(1, 5)]
    return [each.of("policy") for each in checkpoints], [each.of("average") for each in checkpoints]


@pytest.fixture
def averaged(make_trainer):
    trainer, models, run_dir = make_trainer(*RUN, f"eval.ema_decay={DECAY}", folder="averaged")
    start = {name: value.clone() for name, value in models.policy.state_tensors().items()}
    trainer.run()
    return run_dir, start


def test_average_is_that_of_the_weights_of_all_steps(averaged):
    run_dir, expected = averaged
    weights, averages = policies(run_dir)
    for of_step, found in zip(weights, averages, strict=True):
        expected = {
            name: DECAY * value + (1 - DECAY) * of_step[name] for name, value in expected.items()
        }
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-7, rtol=1e-5)
    assert find_checkpoint(run_dir).evaluated.keys() == averages[-1].keys()
    assert all(
        value.equal(averages[-1][name])
        for name, value in find_checkpoint(run_dir).evaluated.items()
    )
    assert any(not value.equal(weights[-1][name]) for name, value in averages[-1].items())


def test_training_is_the_same_and_evaluations_are_of_the_average(make_trainer, averaged):
    run_dir, _ = averaged
    plain, models, plain_dir = make_trainer(*RUN, folder="plain")
    plain.run()
    for ours, theirs in zip(
        *(read_metrics(RunFolder(d)) for d in (run_dir, plain_dir)), strict=True
    ):
        for name in ("loss/total", "optim/grad_norm", "reward/mean"):
            assert ours.get(name) == theirs.get(name)

    # What the average makes of the held-out prompts, and not what the weights do.
    models.policy.load_state_tensors(find_checkpoint(run_dir).evaluated)
    (part,) = plain._evaluate()
    stored = read_metrics(RunFolder(run_dir))[-1]
    scores = part.rewards.raw[:, :, part.rewards.names.index("aesthetic")]
    assert stored["eval/aesthetic"] == pytest.approx(scores.mean().item(), abs=1e-6)
    assert stored["eval/aesthetic"] != read_metrics(RunFolder(plain_dir))[-1]["eval/aesthetic"]


def test_a_resumed_run_goes_on_with_its_average(make_trainer, averaged):
    run_dir, _ = averaged
    decay = f"eval.ema_decay={DECAY}"
    first, _, parts_dir = make_trainer(
        *RUN, decay, folder="parts", change_batch=signal_at(1, signal.SIGINT)
    )
    assert first.run() is None
    second, _, _ = make_trainer(*RUN, decay, "train.resume=auto", folder="parts")
    second.run()
    _, whole = policies(run_dir)
    found = load_checkpoint(RunFolder(parts_dir).checkpoint_dir(4)).of("average")
    assert all(value.equal(whole[-1][name]) for name, value in found.items())
