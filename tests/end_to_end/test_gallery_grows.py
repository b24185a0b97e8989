"""The gallery of a run that goes on: what a reload shows, step by step."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.runs import Brightness

SMALL = (
    "train.steps=3",
    "train.eval_every=2",
    "train.checkpoint_every=1",
    "train.keep_checkpoints=9",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "train.micro_batch_size=4",
    "eval.samples_per_prompt=1",
)


def read_data(run_dir, key):
    text = (run_dir / "gallery" / "data" / f"{key}.js").read_text()
    return json.loads(text.partition(", ")[2].removesuffix(");\n"))


def listed(run_dir):
    """Steps and evaluations that the page lists; every file it names is there."""
    run = read_data(run_dir, "run")
    steps = [
        entry for chunk in run["chunks"] for entry in read_data(run_dir, chunk["key"])["steps"]
    ]
    for step in steps:
        for group in step["groups"]:
            for image in group["images"]:
                assert (run_dir / "gallery" / "thumbs" / image).with_suffix(".webp").is_file()
    evaluations = [read_data(run_dir, entry["key"]) for entry in run["evaluations"]]
    return [entry["step"] for entry in steps], [entry["step"] for entry in evaluations]


@pytest.fixture
def make_run(make_trainer):
    """Builds a small run; `look` is called with its folder at the start of every step."""

    def build(*overrides, look):
        def watch(batch_for_step):
            def asked(at):
                look(run_dir)
                return batch_for_step(at)

            return asked

        trainer, _, run_dir = make_trainer(
            *(*SMALL, *overrides),
            term=Brightness(),
            change_batch=watch,
            held_out=2,
        )
        return trainer, run_dir

    return build


def test_gallery_shows_every_step_once_it_is_recorded_and_forgets_what_a_run_goes_back_on(
    make_run,
):
    shown = []
    trainer, run_dir = make_run(look=lambda run_dir: shown.append(listed(run_dir)))

    trainer.run()

    assert shown == [([], [0]), ([1], [0]), ([1, 2], [0, 2])]
    assert listed(run_dir) == ([1, 2, 3], [0, 2, 3])
    shown.clear()

    def look(run_dir):
        thumbs = [path.name for path in (run_dir / "gallery" / "thumbs").iterdir()]
        shown.append((listed(run_dir), sorted(name for name in thumbs if name[-1].isdigit())))

    resumed, _ = make_run(f"train.resume={run_dir}/checkpoints/step-000001", look=look)
    resumed.run()

    assert shown[0] == (([1], [0]), ["eval-000000", "step-000001"])
    assert listed(run_dir) == ([1, 2, 3], [0, 2, 3])
