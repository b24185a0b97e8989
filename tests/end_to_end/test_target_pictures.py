"""Target images as examples on the embedded model: anchor.weight, train.method=sft."""

from __future__ import annotations

import dataclasses
import signal

import pytest
import torch
from PIL import Image

from glm_grpo.builders.models import find_start
from glm_grpo.builders.prompts import build_prompts
from glm_grpo.check import check_targets
from glm_grpo.config import compose_config
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.summaries import untrained_means
from glm_grpo.run.tables import read_metrics
from glm_grpo.studio.gallery.contact_sheet import write_contact_sheet
from glm_grpo.training.resume import find_checkpoint
from tests.end_to_end.runs import Brightness, comparable_metrics, signal_at

RUN = (
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "train.steps=3",
    "optim.learning_rate=1e-3",
)


def test_examples_are_learned(make_trainer):
    # The rate of the weights is all that differs; the same targets come every step.
    losses = {}
    for weight in (0.01, 20.0):
        trainer, _, run_dir = make_trainer(
            *RUN,
            f"anchor.weight={weight}",
            "loss.kl_coef=0",
            "optim.learning_rate=2e-4",
            folder=f"at-{weight}",
            term=Brightness(),
        )
        batch = trainer.step.batch_for_step(1)
        trainer.step.batch_for_step = lambda step, batch=batch: dataclasses.replace(
            batch, seed=step - 1
        )
        trainer.run()
        rows = read_metrics(RunFolder(run_dir))[1:]
        losses[weight] = [row["anchor/cross_entropy"] for row in rows]
        assert [row["anchor/weight"] for row in rows] == [weight] * 3
    # Before any update they are the same.
    assert losses[20.0][0] == pytest.approx(losses[0.01][0], rel=1e-5)
    assert losses[20.0][-1] < 0.8 * losses[0.01][-1]


def test_training_prompts_without_any_target_are_refused(configs_dir, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the word \\"OPEN\\""}\n{"prompt": "the word \\"SHUT\\""}\n')
    few = [
        f"data.path={path}",
        f"data.eval_path={path}",
        *RUN,
        "rollout.height=64",
        "rollout.width=64",
    ]
    for learning, key in (
        ("anchor.final_weight=0.1", "anchor.weight = 0"),
        ("train.method=sft", "train.method = 'sft'"),
    ):
        config = compose_config(configs_dir, "tiny", [learning, *few])
        with pytest.raises(ConfigError, match=rf"{key}.*\n.*none of the 2 training"):
            check_targets(config, build_prompts(config))


SFT = ("train.method=sft", *RUN, "train.eval_every=3", "train.checkpoint_every=1")


def test_supervised_fine_tuning_learns_targets_and_samples_nothing(make_trainer):
    trainer, _, run_dir = make_trainer(*SFT, "optim.learning_rate=2e-4", term=Brightness())
    batch = trainer.step.batch_for_step(1)
    trainer.step.batch_for_step = lambda step: batch
    assert trainer.run() is not None
    folder = RunFolder(run_dir)
    untrained, *rows = read_metrics(folder)
    assert {name for name in untrained if name not in ("step", "time/evaluation")} == {
        name for name in rows[-1] if name.startswith("eval/")
    }
    for row in rows:
        assert row["loss/total"] == row["sft/cross_entropy"]
        n = token_layout(batch.height, batch.width)
        parts = (
            n.num_preview * row["sft/cross_entropy/preview"]
            + (n.num_tokens - n.num_preview) * row["sft/cross_entropy/target"]
        )
        assert parts / n.num_tokens == pytest.approx(row["sft/cross_entropy"], rel=1e-6)
        assert row["policy/entropy"] > 0
        assert "reward/mean" not in row
        assert "time/rollout" not in row
    assert rows[-1]["loss/total"] < 0.8 * rows[0]["loss/total"]
    assert not folder.rollouts_dir.exists()


def test_steps_without_a_target_learn_nothing_and_are_no_failure(make_trainer):
    trainer, models, run_dir = make_trainer(
        *SFT, "train.steps=4", "train.minibatches_per_rollout=2", term=Brightness()
    )
    batch = trainer.step.batch_for_step(1)
    bare = tuple(dataclasses.replace(prompt, target=None) for prompt in batch.prompts)
    first = (batch.prompts[0], bare[1])
    heads = []

    def dealt(step):
        heads.append(models.policy.model.lm_head.weight.detach().clone())
        return dataclasses.replace(batch, prompts=first if step == 1 else bare)

    trainer.step.batch_for_step = dealt
    assert trainer.run() is not None
    rows = read_metrics(RunFolder(run_dir))[1:]
    # Half of its minibatches have an example.
    assert rows[0]["sft/cross_entropy"] > 0
    assert [row["sft/cross_entropy"] for row in rows[1:]] == [None] * 3
    assert [row["loss/total"] for row in rows[1:]] == [0.0] * 3
    assert [row["optim/skipped_updates"] for row in rows] == [0.0] * 4
    assert not torch.equal(heads[1], heads[0])
    # Momentum does not move weights on no evidence.
    assert torch.equal(heads[3], heads[1])


def test_a_run_begins_with_the_weights_of_another_one(make_trainer):
    held = "model.adapter={rank: 4, alpha: 8.0}"
    first, _, first_dir = make_trainer(*SFT, held, folder="first", term=Brightness())
    first.run()
    after = read_metrics(RunFolder(first_dir))[-1]
    more = (*RUN, held, "train.steps=2", "train.eval_every=1", "train.checkpoint_every=1")
    start = f"model.start_from={first_dir}"
    second, models, second_dir = make_trainer(*more, start, folder="second", term=Brightness())
    second.run()
    untrained, one, two = read_metrics(RunFolder(second_dir))
    first_of_all = read_metrics(RunFolder(first_dir))[0]["eval/brightness"]
    assert untrained_means(RunFolder(second_dir))["brightness"] == pytest.approx(first_of_all)
    assert untrained_means(RunFolder(first_dir)) == {}
    write_contact_sheet(RunFolder(second_dir), second_dir / "sheet.png", columns=1)
    # Target, untrained, before and after, each of 64 pixels with a gap of 4.
    assert Image.open(second_dir / "sheet.png").height == 4 * (64 + 4)
    assert untrained["eval/brightness"] == pytest.approx(after["eval/brightness"], abs=1e-5)
    # The reference is what the run began with.
    assert one["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert two["kl/reference"] > 1e-6
    checkpoint = load_checkpoint(newest_checkpoint(RunFolder(second_dir)))
    # The reference of adapters is kept in the checkpoint; a copy of all weights is not.
    assert "reference" in checkpoint.tensors
    found = find_checkpoint(first_dir)
    reference = models.policy.reference_tensors()
    for name, tensor in reference.items():
        assert torch.equal(tensor, found.evaluated[name].cpu()), name


def test_a_run_that_begins_with_another_one_goes_on_as_if_it_had_not_stopped(make_trainer):
    # Of all weights, whose reference no checkpoint keeps: it is read from the other run again.
    first, _, first_dir = make_trainer(*SFT, "train.steps=1", folder="first", term=Brightness())
    first.run()
    more = (*RUN, "train.steps=2", "train.eval_every=2", "train.checkpoint_every=1")
    more = (*more, f"model.start_from={first_dir}")
    whole, _, whole_dir = make_trainer(*more, folder="whole", term=Brightness())
    whole.run()
    stopped, _, run_dir = make_trainer(
        *more, folder="parts", term=Brightness(), change_batch=signal_at(1, signal.SIGINT)
    )
    assert stopped.run() is None
    assert "reference" not in load_checkpoint(newest_checkpoint(RunFolder(run_dir))).tensors
    going_on, _, _ = make_trainer(*more, "train.resume=auto", folder="parts", term=Brightness())
    assert going_on.run() is not None
    assert comparable_metrics(run_dir) == comparable_metrics(whole_dir)
    assert read_metrics(RunFolder(run_dir))[-1]["kl/reference"] > 1e-6


def test_sizes_at_which_no_target_can_be_read_are_refused(configs_dir, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"a circle, number {index}\n" for index in range(8)))
    long = ("rollout.height=96", "rollout.width=480")
    long = (*long, f"data.path={path}", f"data.eval_path={path}")
    for learning in (["train.method=sft"], ["anchor.weight=0.1"]):
        with pytest.raises(ConfigError, match="rollout.height=96, rollout.width=480.*4 times"):
            build_prompts(compose_config(configs_dir, "tiny", [*long, *learning]))
    assert build_prompts(compose_config(configs_dir, "tiny", long)).training


def test_weights_of_another_adapter_are_refused_before_anything_is_loaded(
    make_trainer, configs_dir
):
    first, _, first_dir = make_trainer(*SFT, "train.steps=1", folder="first", term=Brightness())
    first.run()
    given = [f"model.start_from={first_dir}", "model.adapter={rank: 4, alpha: 8.0}"]
    with pytest.raises(ConfigError, match=r"model.start_from = (.|\n)*model.adapter = None"):
        find_start(compose_config(configs_dir, "tiny", given))
    misspelt = [f"model.start_from={first_dir.parent / 'frist'}"]
    with pytest.raises(CheckpointError, match=f"frist' does not exist; did you mean {first_dir}"):
        find_start(compose_config(configs_dir, "tiny", misspelt))
