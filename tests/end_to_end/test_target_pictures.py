"""Target pictures as examples on the embedded model: anchor.weight, train.method=sft."""

from __future__ import annotations

import dataclasses
import shutil
import signal

import pytest
import torch

from glm_grpo.builders.models import find_start
from glm_grpo.builders.prompts import build_prompts, check_prompt_sets
from glm_grpo.config import compose_config
from glm_grpo.config.sections import AnchorSection
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.checkpoint.files import load_checkpoint, newest_checkpoint
from glm_grpo.training.checkpoint.resume import find_checkpoint
from glm_grpo.training.targets import anchor_weight

pytestmark = pytest.mark.usefixtures("cached_rollouts")

RUN = (
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "train.steps=3",
    "optim.learning_rate=1e-3",
)


@pytest.mark.parametrize(
    ("final", "expected"), [(None, [0.9] * 3), (0.1, [0.9, 0.5, 0.1]), (0.0, [0.9, 0.45, 0.0])]
)
def test_weight_goes_to_the_last_one_in_equal_steps(final, expected):
    settings = AnchorSection(weight=0.9, final_weight=final)
    assert [anchor_weight(settings, step, 3) for step in (1, 2, 3)] == pytest.approx(expected)
    assert anchor_weight(settings, 1, 1) == 0.9


def test_examples_are_learned(make_trainer):
    # The rate of the weights is all that differs; the same targets come every step.
    losses = {}
    for weight in (0.01, 20.0):
        trainer, _, run_dir = make_trainer(
            *RUN, f"anchor.weight={weight}", "loss.kl_coef=0", folder=f"at-{weight}"
        )
        batch = trainer.source.batch_for_step(0)
        trainer.source.batch_for_step = lambda step, batch=batch: dataclasses.replace(
            batch, seed=step
        )
        trainer.run()
        rows = read_metrics(RunFolder(run_dir))[1:]
        losses[weight] = [row["anchor/cross_entropy"] for row in rows]
        assert [row["anchor/weight"] for row in rows] == [weight] * 3
    # Before any update they are the same, and near what the model was trained to.
    assert losses[20.0][0] == pytest.approx(losses[0.01][0], rel=1e-5)
    assert 0 < losses[20.0][0] < 0.1
    assert losses[20.0][-1] < 0.8 * losses[0.01][-1]


def test_weight_of_zero_is_a_run_without(make_trainer):
    rows = []
    for more in ((), ("anchor.weight=0", "anchor.final_weight=0")):
        trainer, _, run_dir = make_trainer(*RUN, *more, "train.steps=1", folder=f"run-{len(more)}")
        trainer.run()
        rows.append(read_metrics(RunFolder(run_dir))[-1])
    for name, value in rows[0].items():
        if not name.startswith(("time/", "throughput/", "memory/")):
            assert rows[1][name] == value, name
    assert "anchor/weight" not in rows[1]


def test_previews_are_zeros_the_targets_tokens_or_those_of_a_small_picture(make_trainer):
    trainer, models, _ = make_trainer(*RUN)
    targets = torch.stack([each.target for each in trainer.source.batch_for_step(0).prompts])
    layout = token_layout(*targets.shape[-2:])
    of = {
        preview: models.policy.tokenize_pictures(targets, preview=preview)
        for preview in ("zeros", "repeat", "encode")
    }
    n = layout.num_preview
    assert not of["zeros"][:, :n].any()
    for each in of.values():
        assert torch.equal(each[:, n:], of["zeros"][:, n:])
    grid = of["repeat"][:, n:].reshape(-1, *layout.target)
    rows, columns = (big // small for big, small in zip(layout.preview, layout.target, strict=True))
    enlarged = grid.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
    assert torch.equal(of["repeat"][:, :n], enlarged.flatten(1))
    # A preview of this model's is larger than its target: the picture is made larger, too.
    side = 32 * layout.preview[0]
    large = torch.nn.functional.interpolate(
        targets.float(), [side, side], mode="bicubic", antialias=True
    )
    expected = models.policy.tokenize_pictures(
        large.round().clamp(0, 255).to(torch.uint8), has_preview=False
    )
    assert torch.equal(of["encode"][:, :n], expected)


@pytest.mark.parametrize("size", [(128, 96), (96, 128), (256, 256), (32, 64)])
@pytest.mark.parametrize("preview", ["encode", "repeat"])
def test_pictures_of_every_size_have_the_tokens_that_are_generated(make_trainer, size, preview):
    _, models, _ = make_trainer(*RUN)
    processor = models.policy.processor.image_processor
    pixels = torch.zeros(1, 3, *size, dtype=torch.uint8)
    expected = token_layout(*size).num_tokens
    assert models.policy.tokenize_pictures(pixels, preview=preview).shape == (1, expected)
    # The published processor enlarges what is smaller than 512 x 512 pixels.
    processor.size = {"shortest_edge": 512**2, "longest_edge": 2048**2}
    assert models.policy.tokenize_pictures(pixels, preview=preview).shape == (1, expected)


def test_training_prompts_without_any_target_are_refused(make_trainer, configs_dir, tmp_path):
    _, models, _ = make_trainer(*RUN)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the word \\"OPEN\\""}\n{"prompt": "the word \\"SHUT\\""}\n')
    for weight in ("anchor.weight=0.1", "anchor.final_weight=0.1"):
        config = compose_config(configs_dir, "tiny", [weight])
        assert check_prompt_sets(config, models, build_prompts(config)) == []
        few = [f"data.path={path}", "rollout.prompts_per_step=2"]
        config = compose_config(configs_dir, "tiny", [weight, *few])
        with pytest.raises(ConfigError, match=r"anchor.weight = 0.*\n.*none of the 2 training"):
            check_prompt_sets(config, models, build_prompts(config))


SFT = ("train.method=sft", *RUN, "train.eval_every=3", "train.checkpoint_every=1")


def test_supervised_fine_tuning_learns_targets_and_samples_nothing(make_trainer):
    trainer, _, run_dir = make_trainer(*SFT, "optim.learning_rate=2e-4")
    batch = trainer.source.batch_for_step(0)
    trainer.source.batch_for_step = lambda step: batch
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


def test_an_interrupted_supervised_run_goes_on_as_if_it_had_not_been(make_trainer):
    whole, _, whole_dir = make_trainer(*SFT, "eval.ema_decay=0.5", folder="whole")
    whole.run()
    first, _, run_dir = make_trainer(*SFT, "eval.ema_decay=0.5", folder="parts")
    batch_for_step = first.source.batch_for_step

    def stopped_at_two(step):
        if step == 1:
            signal.raise_signal(signal.SIGINT)
        return batch_for_step(step)

    first.source.batch_for_step = stopped_at_two
    assert first.run() is None
    second, _, _ = make_trainer(*SFT, "eval.ema_decay=0.5", "train.resume=auto", folder="parts")
    assert second.run() is not None

    def figures(folder):
        return [
            {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/", "memory/"))}
            for row in read_metrics(RunFolder(folder))
        ]

    assert figures(run_dir) == figures(whole_dir)


def test_steps_without_a_target_learn_nothing_and_are_no_failure(make_trainer):
    trainer, models, run_dir = make_trainer(
        *SFT, "train.steps=4", "train.minibatches_per_rollout=2"
    )
    batch = trainer.source.batch_for_step(0)
    bare = tuple(dataclasses.replace(prompt, target=None) for prompt in batch.prompts)
    first = (batch.prompts[0], bare[1])
    heads = []

    def dealt(step):
        heads.append(models.policy.model.lm_head.weight.detach().clone())
        return dataclasses.replace(batch, prompts=first if step == 0 else bare)

    trainer.source.batch_for_step = dealt
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


def test_supervised_fine_tuning_without_any_target_is_refused(make_trainer, configs_dir, tmp_path):
    _, models, _ = make_trainer(*RUN)
    path = tmp_path / "prompts.txt"
    path.write_text('the word "OPEN"\nthe word "SHUT"\n')
    few = [f"data.path={path}", "rollout.prompts_per_step=2"]
    config = compose_config(configs_dir, "tiny", ["train.method=sft", *few])
    with pytest.raises(ConfigError, match=r"train.method = 'sft'\n.*none of the 2 training"):
        check_prompt_sets(config, models, build_prompts(config))


@pytest.mark.parametrize(
    "adapter", [pytest.param("null", marks=pytest.mark.long), "{rank: 4, alpha: 8.0}"]
)
def test_a_run_begins_with_the_weights_of_another_one(make_trainer, adapter):
    held = f"model.adapter={adapter}"
    first, _, first_dir = make_trainer(*SFT, held, folder="first")
    first.run()
    after = read_metrics(RunFolder(first_dir))[-1]
    more = (*RUN, held, "train.steps=2", "train.eval_every=1", "train.checkpoint_every=1")
    start = f"model.start_from={first_dir}"
    second, models, second_dir = make_trainer(*more, start, "train.steps=2", folder="second")
    second.run()
    untrained, one, two = read_metrics(RunFolder(second_dir))
    for name in ("eval/total", "eval/ocr", "eval/lpips"):
        assert untrained[name] == pytest.approx(after[name], abs=1e-5)
    # The reference is what the run began with.
    assert one["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert two["kl/reference"] > 1e-6
    checkpoint = load_checkpoint(newest_checkpoint(RunFolder(second_dir)))
    assert ("reference" in checkpoint.tensors) == (adapter != "null")
    # Of adapters it is kept in the checkpoint; a copy of all weights is not.
    found = find_checkpoint(first_dir)
    reference = models.policy.reference_tensors()
    for name, tensor in reference.items():
        assert torch.equal(tensor, found.evaluated[name].cpu()), name


def test_a_run_that_begins_with_another_one_goes_on_as_if_it_had_not_stopped(make_trainer):
    first, _, first_dir = make_trainer(*SFT, "train.steps=1", folder="first")
    first.run()
    more = (*RUN, "train.steps=2", "train.eval_every=2", "train.checkpoint_every=1")
    start = f"model.start_from={first_dir}"
    whole, _, whole_dir = make_trainer(*more, start, folder="whole")
    whole.run()
    parts, _, run_dir = make_trainer(*more, start, folder="parts")
    batch_for_step = parts.source.batch_for_step

    def stopped_at_one(step):
        if step == 0:
            signal.raise_signal(signal.SIGINT)
        return batch_for_step(step)

    parts.source.batch_for_step = stopped_at_one
    assert parts.run() is None
    going_on, _, _ = make_trainer(*more, start, "train.resume=auto", folder="parts")
    assert going_on.run() is not None
    rows = [read_metrics(RunFolder(each))[-1] for each in (whole_dir, run_dir)]
    for name in ("kl/reference", "loss/total", "eval/total", "reward/mean"):
        assert rows[0][name] == rows[1][name], name


def test_sizes_at_which_no_target_can_be_read_are_refused(configs_dir, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"a circle, number {index}\n" for index in range(8)))
    long = ("rollout.height=96", "rollout.width=480")
    long = (*long, f"data.path={path}", f"data.eval_path={path}")
    for learning in (["train.method=sft"], ["anchor.weight=0.1"]):
        with pytest.raises(ConfigError, match="rollout.height=96, rollout.width=480.*4 times"):
            build_prompts(compose_config(configs_dir, "tiny", [*long, *learning]))
    assert build_prompts(compose_config(configs_dir, "tiny", long)).training


def test_the_run_that_another_began_with_may_go_on_meanwhile(make_trainer):
    longer = (*SFT, "optim.schedule=constant", "train.checkpoint_every=1")
    first, _, first_dir = make_trainer(*longer, "train.steps=1", folder="first")
    first.run()
    more = (*RUN, "optim.schedule=constant", "train.checkpoint_every=1")
    start = f"model.start_from={first_dir}"
    whole, models, _ = make_trainer(*more, start, "train.steps=2", folder="whole")
    whole.run()
    parts, _, run_dir = make_trainer(*more, start, "train.steps=1", folder="parts")
    parts.run()
    onwards = (*longer, "train.steps=2", "train.resume=auto")
    make_trainer(*onwards, folder="first")[0].run()

    resumed = (*more, start, "train.steps=2", "train.resume=auto")
    going_on, others, _ = make_trainer(*resumed, folder="parts")
    going_on.run()

    for name, tensor in models.policy.state_tensors().items():
        assert torch.equal(tensor, others.policy.state_tensors()[name]), name
    rows = [read_metrics(RunFolder(each))[-1] for each in (first_dir.parent / "whole", run_dir)]
    assert rows[0]["kl/reference"] == rows[1]["kl/reference"] > 0

    shutil.rmtree(RunFolder(first_dir).checkpoint_dir(1))
    with pytest.raises(CheckpointError, match="step-000001' is not there; a run begins"):
        make_trainer(*resumed, "train.steps=3", folder="parts")


def test_weights_of_another_adapter_are_refused_before_anything_is_loaded(
    make_trainer, configs_dir
):
    first, _, first_dir = make_trainer(*SFT, "train.steps=1", folder="first")
    first.run()
    given = [f"model.start_from={first_dir}", "model.adapter={rank: 4, alpha: 8.0}"]
    with pytest.raises(ConfigError, match=r"model.start_from = (.|\n)*model.adapter = None"):
        find_start(compose_config(configs_dir, "tiny", given))
    nowhere = [f"model.start_from={first_dir.parent / 'nowhere'}"]
    with pytest.raises(CheckpointError, match="nowhere"):
        find_start(compose_config(configs_dir, "tiny", nowhere))
