"""Totals of evaluations compare across steps, also where training standardises inside groups."""

from __future__ import annotations

import dataclasses
import json
from statistics import fmean

import pyarrow
import pyarrow.parquet
import pytest
import torch

from glm_grpo.gallery import write_gallery
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import evaluation_steps, read_evaluation, read_metrics, read_table
from glm_grpo.training.checkpoint.files import load_checkpoint, newest_checkpoint
from glm_grpo.training.recording.summaries import summarise
from rewards.score import Scorer, Term
from rewards.types import RewardError

pytestmark = pytest.mark.usefixtures("cached_rollouts")

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
    """Brightness, and on held-out prompts as much more as the step is to have.

    It fails in the evaluation of one step.
    """

    def __init__(self, fails_at=None, step=-1):
        self._fails_at, self._step, self._held_out, self._asked = fails_at, step, None, set()

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
            if self._step == self._fails_at:
                raise ConnectionError("the scorer is gone")
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


@pytest.mark.parametrize("samples", [1, 2])
def test_totals_rise_with_the_scores_and_the_best_checkpoint_is_the_best(make_run, samples):
    trainer, _, run_dir = make_run(f"eval.samples_per_prompt={samples}", term=Rising())
    (*_, total) = trainer.run()
    folder = RunFolder(run_dir)

    scores = torch.tensor(read_table(folder.evaluation_path(0))["raw/brightness"].to_pylist())
    assert len(scores) == HELD_OUT * samples
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


def test_stored_totals_are_those_that_every_reader_gets(make_run):
    trainer, _, run_dir = make_run("eval.samples_per_prompt=2", term=Rising())
    trainer.run()
    folder = RunFolder(run_dir)
    for step in evaluation_steps(folder):
        stored = read_table(folder.evaluation_path(step))["total"].to_pylist()
        assert read_evaluation(folder, step)["total"].to_pylist() == stored


def test_a_run_that_resumes_goes_on_with_the_same_scale(make_run):
    samples = "eval.samples_per_prompt=1"
    trainer, _, run_dir = make_run(samples, term=Rising(fails_at=3))
    with pytest.raises(RewardError, match="the scorer is gone"):
        trainer.run()
    resumed, _, _ = make_run(samples, "train.resume=auto", term=Rising(step=2))
    resumed.run()
    whole, _, whole_dir = make_run(samples, term=Rising(), folder="whole")
    whole.run()
    assert totals_of(run_dir) == totals_of(whole_dir)
    best = [load_checkpoint(newest_checkpoint(RunFolder(path))) for path in (run_dir, whole_dir)]
    assert best[0].metadata["best_total"] == best[1].metadata["best_total"]


def make_old(folder, steps):
    """As versions wrote it that standardised evaluations inside each group: two samples each."""
    for step in steps:
        path = folder.evaluation_path(step)
        table = read_table(path)
        groups = torch.tensor(table["raw/brightness"].to_pylist()).unflatten(0, (-1, 2))
        totals = (groups - groups.mean(dim=1, keepdim=True)) / groups.std(dim=1, keepdim=True)
        column = pyarrow.array(totals.flatten().tolist(), pyarrow.float32())
        index = table.column_names.index("total")
        pyarrow.parquet.write_table(table.set_column(index, "total", column), path)


def test_a_run_of_before_is_read_and_resumed_on_the_new_scale(make_run):
    samples = "eval.samples_per_prompt=2"
    trainer, _, run_dir = make_run(samples, term=Rising(fails_at=3))
    with pytest.raises(RewardError, match="the scorer is gone"):
        trainer.run()
    folder = RunFolder(run_dir)
    new = [summarise(folder)[-1], totals_of(run_dir)]
    make_old(folder, [0, 1, 2])
    assert fmean(read_table(folder.evaluation_path(2))["total"].to_pylist()) == pytest.approx(
        0, abs=1e-5
    )
    checkpoint = newest_checkpoint(folder) / "checkpoint.json"
    metadata = json.loads(checkpoint.read_text())
    assert metadata["metadata"]["best_step"] == 2
    metadata["metadata"]["best_total"] = 1e-7
    checkpoint.write_text(json.dumps(metadata))

    assert summarise(folder)[-1] == new[0]
    write_gallery(folder, ())
    shown = (folder.gallery_path.parent / "data" / "evaluation-000002.js").read_text()
    groups = json.loads(shown.partition(",")[2].rpartition(")")[0])["groups"]
    means = [total for group in groups for total in group["total"]]
    assert fmean(means) == pytest.approx(new[1][2], abs=1e-5)

    # Step 3 is no better than step 2, whose total was on the old scale.
    resumed, _, _ = make_run(samples, "train.resume=auto", term=Rising(step=2))
    resumed.run()
    assert load_checkpoint(newest_checkpoint(folder)).metadata["best_step"] == 2


def test_a_resumed_run_says_that_the_evaluation_of_step_0_is_gone(make_run):
    samples = "eval.samples_per_prompt=1"
    trainer, _, run_dir = make_run(samples, term=Rising(fails_at=3))
    with pytest.raises(RewardError, match="the scorer is gone"):
        trainer.run()
    RunFolder(run_dir).evaluation_path(0).unlink()
    with pytest.raises(OSError, match=r"step-000000\.parquet is gone.* Restore it from a copy"):
        make_run(samples, "train.resume=auto", term=Rising(step=2))[0].run()
