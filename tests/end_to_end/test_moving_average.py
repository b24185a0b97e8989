"""eval.ema_decay: evaluations, best checkpoint and exports are of the averaged weights."""

from __future__ import annotations

import pytest
import torch

from glm_grpo.run.checkpoints import load_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.evaluate import evaluate
from glm_grpo.training.resume import find_checkpoint
from tests.end_to_end.runs import Brightness

RUN = (
    "rollout.group_size=2",
    "train.steps=3",
    "train.eval_every=3",
    "train.checkpoint_every=1",
    "train.keep_checkpoints=9",
    "optim.learning_rate=1e-1",
)
DECAY = 0.75


def test_average_is_that_of_the_weights_of_all_steps_and_is_what_is_evaluated(make_trainer):
    trainer, models, run_dir = make_trainer(
        *RUN, f"eval.ema_decay={DECAY}", "rollout.temperature=2", term=Brightness()
    )
    expected = {name: value.clone() for name, value in models.policy.state_tensors().items()}
    trainer.run()

    for step in (1, 2, 3):
        checkpoint = load_checkpoint(RunFolder(run_dir).checkpoint_dir(step))
        weights, average = checkpoint.tensors["policy"], checkpoint.tensors["average"]
        # Of 0.75, which three steps are too few for.
        decay = (0.0, 2 / 11, 3 / 12)[step - 1]
        expected = {
            name: decay * value + (1 - decay) * weights[name] for name, value in expected.items()
        }
        for name, value in expected.items():
            torch.testing.assert_close(average[name], value, atol=1e-7, rtol=1e-5)
    assert any(not value.equal(weights[name]) for name, value in average.items())
    found = find_checkpoint(run_dir).evaluated
    assert all(value.equal(average[name]) for name, value in found.items())

    # What the average makes of the held-out prompts, and not what the weights do.
    scores = []
    for evaluated in (average, weights):
        models.policy.load_state_tensors(evaluated)
        part = evaluate(models, trainer._evaluation_batches, step=3)
        scores.append(part.rewards.raw.mean().item())
    stored = read_metrics(RunFolder(run_dir))[-1]["eval/brightness"]
    assert stored == pytest.approx(scores[0], abs=1e-6)
    assert scores[0] != scores[1]
