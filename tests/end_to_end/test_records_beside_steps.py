"""The files of a step are written while the next step is made."""

from __future__ import annotations

import threading

import pytest

from glm_grpo.errors import StorageError
from glm_grpo.run.recorder import Recorder
from glm_grpo.run.tables import read_metrics, stored_steps
from glm_grpo.studio.gallery import write
from glm_grpo.training import saver

PATIENCE = 60.0


@pytest.fixture
def events(monkeypatch):
    """What was done, in its order, of which the thread that writes reports its own."""
    done = []

    def report(owner, name, event):
        act = getattr(owner, name)

        def reported(*arguments, **options):
            result = act(*arguments, **options)
            done.append(event(*arguments, **options))
            return result

        monkeypatch.setattr(owner, name, reported)

    report(Recorder, "record_step", lambda _, step, metrics: f"line {step}")
    report(Recorder, "record_evaluation", lambda _, evaluation: f"evaluation {evaluation.step}")
    report(write, "update_gallery", lambda _, step: f"gallery {step}")
    report(saver, "save_checkpoint", lambda *_, step, **__: f"checkpoint {step}")
    return done


def test_a_step_begins_while_the_one_before_is_written_and_checkpoints_wait(
    make_run, events, monkeypatch
):
    third = threading.Event()
    record_rollout = Recorder.record_rollout

    def slow(recorder, experience, pictures, step):
        if step == 2:
            # Were it written before step 3 began, nobody would set it.
            assert third.wait(PATIENCE)
        record_rollout(recorder, experience, pictures, step)

    def at_step(_, step):
        events.append(f"step {step}")
        if step == 3:
            third.set()

    monkeypatch.setattr(Recorder, "record_rollout", slow)
    trainer, _, folder = make_run(
        "train.steps=4", "train.checkpoint_every=3", "train.eval_every=3", at_step=at_step
    )
    trainer.run()

    # Steps are asked for by the main thread at any moment of what is written beside.
    assert [event for event in events if not event.startswith("step")] == [
        *("evaluation 0", "line 0", "gallery 0", "line 1", "gallery 1", "line 2", "gallery 2"),
        *("line 3", "evaluation 3", "gallery 3", "checkpoint 3"),
        *("line 4", "evaluation 4", "gallery 4", "checkpoint 4"),
    ]
    assert events.index("step 3") < events.index("line 2")
    assert events.index("checkpoint 3") < events.index("step 4")
    assert [row["step"] for row in read_metrics(folder)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("every", [1, 1000], ids=["at its checkpoint", "at the next step"])
def test_what_cannot_be_written_ends_the_run_without_a_checkpoint(make_run, make_read_only, every):
    trainer, _, folder = make_run(f"train.checkpoint_every={every}")
    make_read_only(folder.rollouts_dir)

    with pytest.raises(StorageError, match=r"Cannot write .*rollouts/step-000001\.parquet: Read-"):
        trainer.run()

    assert [row["step"] for row in read_metrics(folder)] == [0]
    assert stored_steps(folder.rollouts_dir) == []
    assert not folder.checkpoints_dir.exists()
    assert [thread for thread in threading.enumerate() if thread.name.startswith("records")] == []
