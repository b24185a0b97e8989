"""Totals of evaluations compare across steps, also where training standardises inside groups."""

from __future__ import annotations

import dataclasses
from statistics import fmean

import pytest
import torch

from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_table
from rewards.score import Scorer, Term

RUN = (
    "reward.combine=normalize_then_sum",
    "train.steps=4",
    "train.eval_every=1",
    "train.checkpoint_every=1",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "train.micro_batch_size=4",
    # Scores change by GAINS, not by what is learned.
    "optim.learning_rate=1.0e-12",
)
GAINS = (0.0, 0.1, 0.3, 0.2, 0.25)
"""What is added to the scores of the evaluation at each step: the second step is the best."""
HELD_OUT = 3


class Rising:
    """Brightness, and on held-out prompts as much more as the step is to have."""

    def __init__(self):
        self._step, self._held_out, self._asked = -1, None, set()

    def watch(self, batch_for_step):
        def asked(at):
            self._asked = {prompt.prompt_id for prompt in batch_for_step(at).prompts}
            return batch_for_step(at)

        return asked

    def applies_to(self, prompt):
        return True

    def score(self, prompts, pixels):
        gain = 0.0
        prompt_id = prompts[0].prompt_id
        if prompt_id not in self._asked:
            self._held_out = self._held_out or prompt_id
            self._step += prompt_id == self._held_out
            gain = GAINS[self._step]
        return pixels.float().mean(dim=(1, 2, 3)) / 255 + gain

    def modules(self):
        return ()


@pytest.fixture
def make_run(make_trainer):
    def build(*overrides, term, folder="run"):
        def use_term(models):
            terms = [Term("brightness", term, 1.0), Term("shown", Rising(), 0.0)]
            return dataclasses.replace(models, scorer=Scorer(terms))

        return make_trainer(
            *RUN,
            *overrides,
            folder=folder,
            change_stage=use_term,
            change_batch=term.watch,
            held_out=HELD_OUT,
        )

    return build


def totals_of(run_dir):
    rows = read_metrics(RunFolder(run_dir))
    return [row["eval/total"] for row in rows if "eval/total" in row]


def test_totals_rise_with_the_scores_and_the_best_checkpoint_is_the_best(make_run):
    trainer, _, run_dir = make_run("eval.samples_per_prompt=2", term=Rising())
    (*_, total) = trainer.run()
    folder = RunFolder(run_dir)

    scores = torch.tensor(read_table(folder.evaluation_path(0))["raw/brightness"].to_pylist())
    assert len(scores) == HELD_OUT * 2
    # By the untrained model's mean and std over all images, worked out from what was stored.
    expected = [
        fmean(
            (score - scores.mean().item()) / scores.std().item()
            for score in read_table(folder.evaluation_path(step))["raw/brightness"].to_pylist()
        )
        for step in range(5)
    ]
    totals = totals_of(run_dir)
    assert totals == pytest.approx(expected, abs=1e-4)
    assert totals[0] == pytest.approx(0, abs=1e-5)
    assert totals[0] < totals[1] < totals[3] < totals[4] < totals[2]
    # The best one is kept beside the newest.
    assert load_checkpoint(newest_checkpoint(folder)).metadata["best_step"] == 2
    assert folder.checkpoint_dir(2).exists()
    assert (total.name, total.before, total.after) == (
        "total",
        pytest.approx(totals[0], abs=1e-6),
        pytest.approx(totals[4], abs=1e-6),
    )
