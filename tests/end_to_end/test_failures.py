"""A term that fails or hangs stops the run, and nothing else is lost."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
from PIL import Image

from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.recorder import Recorder
from glm_grpo.run.tables import evaluation_steps, read_metrics
from glm_grpo.terminal import explain
from rewards.types import RewardError
from tests.end_to_end.runs import Brightness, comparable_metrics, pay_for

RUN = (
    "train.steps=4",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "train.micro_batch_size=4",
    "eval.samples_per_prompt=1",
    # The pictures of a group differ.
    "rollout.temperature=10",
)


class Failing(Brightness):
    """Brightness, but for the last prompt of one step: its pictures are left to `fail`.

    Id and pictures of that prompt are kept in `refused`.
    """

    def __init__(self, fails_at=None, fail=None):
        super().__init__()
        self._fails_at, self._fail = fails_at, fail
        self._step, self._last = 0, None
        self.refused = None

    def watch(self, batch_for_step):
        """Learns which step is being made; 0 is the evaluation before the first."""

        def asked(at):
            batch = batch_for_step(at)
            self._step, self._last = at, batch.prompts[-1].prompt_id
            return batch

        return asked

    def score(self, prompts, pixels):
        prompt_id = prompts[0].prompt_id
        if self._step == self._fails_at and self._last in (None, prompt_id):
            self.refused = self.refused or (prompt_id, pixels)
            self._fail(pixels, self.refused[1])
        return super().score(prompts, pixels)


@pytest.fixture
def make_run(make_trainer):
    """Builds a small run on one term; another with the same folder goes on with it."""

    def build(term, *overrides, folder="run", timeout_seconds=60.0):
        return make_trainer(
            *(*RUN, *overrides),
            folder=folder,
            term=term,
            change_stage=pay_for(term, timeout_seconds=timeout_seconds),
            change_batch=term.watch,
            held_out=2,
        )

    return build


def refuse_the_second(pixels, group):
    """As a term that can score the first picture of the group alone."""
    if (pixels == group[1]).all(dim=(1, 2, 3)).any():
        raise ConnectionError("the scorer is gone")


def pictures_in(folder):
    return [np.asarray(Image.open(path)).tolist() for path in sorted(folder.glob("*.png"))]


def as_stored(pixels):
    return [picture.permute(1, 2, 0).tolist() for picture in pixels]


def test_a_term_that_fails_leaves_a_checkpoint_and_its_pictures(make_run):
    term = Failing(fails_at=2, fail=refuse_the_second)
    trainer, _, run_dir = make_run(term)
    folder = RunFolder(run_dir)

    with pytest.raises(RewardError) as caught:
        trainer.run()

    prompt_id, pixels = term.refused
    place = run_dir / "failures" / "step-000002"
    message = explain(caught.value)
    assert message.startswith(
        f"RewardError: term brightness, prompt {prompt_id}, image 1: scoring failed with"
    )
    assert "ConnectionError: the scorer is gone" in message
    assert message.endswith(f". The images are in {place}")
    assert pictures_in(place) == as_stored(pixels)
    assert load_checkpoint(newest_checkpoint(folder)).step == 1
    assert [row["step"] for row in read_metrics(folder)] == [0, 1]
    assert folder.gallery_path.is_file()


def test_a_term_that_hangs_stops_the_run_at_its_time_limit(make_run):
    let_go = threading.Event()
    trainer, _, run_dir = make_run(
        Failing(fails_at=1, fail=lambda *_: let_go.wait(100)), timeout_seconds=2.0
    )

    with pytest.raises(RewardError) as caught:
        trainer.run()
    let_go.set()

    place = run_dir / "failures" / "step-000001"
    pattern = r"\w+: term brightness, prompt \w+: not scored within 2 seconds; .*The images are in "
    assert re.match(pattern + re.escape(str(place)), explain(caught.value))
    assert len(pictures_in(place)) == 2
    # Nothing was learned yet, so nothing is saved.
    assert newest_checkpoint(RunFolder(run_dir)) is None


def test_a_term_that_fails_on_held_out_prompts_leaves_the_pictures(make_run):
    def refuse(pixels, group):
        raise ValueError("unreadable")

    term = Failing(fails_at=0, fail=refuse)
    trainer, _, run_dir = make_run(term)

    with pytest.raises(RewardError, match=r"unreadable(.|\n)*failures/step-000000"):
        trainer.run()

    assert len(pictures_in(run_dir / "failures" / "step-000000")) == 1
    assert evaluation_steps(RunFolder(run_dir)) == []


class FailsOnHeldOut(Failing):
    """Fails in the evaluation after a step."""

    def __init__(self, fails_at):
        super().__init__()
        self._fails_at_evaluation = fails_at
        self._held_out = set()

    def score(self, prompts, pixels):
        prompt_id = prompts[0].prompt_id
        if self._step == 0:
            self._held_out.add(prompt_id)
        elif self._step == self._fails_at_evaluation and prompt_id in self._held_out:
            raise ConnectionError("the scorer is gone")
        return super().score(prompts, pixels)


def test_a_term_that_fails_in_an_evaluation_loses_neither_the_step_nor_the_evaluation(
    make_run,
):
    often = ("train.steps=2", "train.eval_every=1")
    trainer, _, run_dir = make_run(FailsOnHeldOut(1), *often)
    with pytest.raises(RewardError, match="the scorer is gone"):
        trainer.run()
    folder = RunFolder(run_dir)
    assert load_checkpoint(newest_checkpoint(folder)).step == 1
    assert [row["step"] for row in read_metrics(folder)] == [0, 1]
    assert "eval/total" not in read_metrics(folder)[-1]

    resumed, _, _ = make_run(Failing(), "train.resume=auto", *often)
    assert resumed.run() is not None
    assert evaluation_steps(folder) == [0, 1, 2]
    whole, _, whole_dir = make_run(Failing(), *often, folder="whole")
    whole.run()
    assert comparable_metrics(run_dir) == comparable_metrics(whole_dir)
    assert ["eval/total" in row for row in read_metrics(folder)] == [True] * 3


@pytest.mark.long
def test_an_evaluation_made_up_for_is_made_again_where_its_line_was_not_written(
    make_run, monkeypatch
):
    often = "train.eval_every=2"
    trainer, _, run_dir = make_run(FailsOnHeldOut(2), often)
    with pytest.raises(RewardError, match="the scorer is gone"):
        trainer.run()

    def killed(*_):
        raise KeyboardInterrupt

    resumed, _, _ = make_run(Failing(), "train.resume=auto", often)
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "amend_step", killed)
        with pytest.raises(KeyboardInterrupt):
            resumed.run()
    folder = RunFolder(run_dir)
    assert folder.evaluation_path(2).exists()
    assert "eval/total" not in read_metrics(folder)[-1]

    resumed, _, _ = make_run(Failing(), "train.resume=auto", often)
    assert resumed.run() is not None
    assert [row["step"] for row in read_metrics(folder) if "eval/total" in row] == [0, 2, 4]
