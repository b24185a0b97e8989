"""NaN and infinity, wherever a run computes: an update is skipped, or the run ends and says why."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from glm_grpo.errors import CheckpointError, DecoderError, NonFiniteError
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.terminal import explain
from glm_grpo.training.checkpoint.files import load_checkpoint, newest_checkpoint, save_checkpoint
from glm_grpo.training.learning_rate import LearningRate
from rewards.types import RewardError


def fail(trainer, error):
    """Runs into the error; its text."""
    with pytest.raises(error) as caught:
        trainer.run()
    return explain(caught.value).removeprefix(f"{type(caught.value).__name__}: ")


def skipped(folder):
    return [row["optim/skipped_updates"] for row in read_metrics(folder)[1:]]


def saved(folder, step):
    """All tensors of a checkpoint: weights, moments, and how often they were updated."""
    tensors = load_checkpoint(folder.checkpoint_dir(step)).tensors
    return {f"{stem}/{name}": each for stem in tensors for name, each in tensors[stem].items()}


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class BrokenGradient:
    """Puts a value into the gradient of one parameter, in one micro-batch of some steps."""

    def __init__(self, value, steps):
        self._value, self._steps = value, steps
        self._is_armed = False
        self._is_hooked = False

    def at_step(self, models, step):
        self._is_armed = step in self._steps
        if not self._is_hooked:
            models.policy.trainable_parameters()[-1].register_hook(self._change)
            self._is_hooked = True

    def _change(self, gradient):
        if not self._is_armed:
            return gradient
        self._is_armed = False
        changed = gradient.clone()
        changed.view(-1)[0] = self._value
        return changed


@pytest.mark.usefixtures("cached_rollouts")
def test_one_broken_gradient_leaves_weights_and_moments_as_they_were(make_run):
    broken = BrokenGradient(torch.nan, steps=[2])
    trainer, _, folder = make_run("train.steps=3", at_step=broken.at_step)

    assert trainer.run() is not None

    assert skipped(folder) == [0, 1, 0]
    before, after, later = (saved(folder, step) for step in (1, 2, 3))
    assert are_equal(before, after)
    assert any("exp_avg_sq" in name for name in before)
    changed = {name for name in before if not torch.equal(before[name], later[name])}
    assert any(name.startswith("policy/") for name in changed)
    assert all(bool(tensor.isfinite().all()) for tensor in later.values())


@pytest.mark.usefixtures("cached_rollouts")
def test_three_broken_gradients_in_a_row_end_a_run_that_can_be_gone_on_with(make_run):
    broken = BrokenGradient(torch.inf, steps=[2, 3, 4])
    trainer, _, folder = make_run("train.steps=5", at_step=broken.at_step)

    message = fail(trainer, NonFiniteError)

    assert message.startswith(
        "step 4: loss or gradient was not finite in any update of 3 steps in a row"
    )
    resume = re.search(r"step-000003: train\.resume=(\S+)$", message)
    assert resume is not None
    assert skipped(folder) == [0, 1, 1, 1]

    resumed, _, _ = make_run("train.steps=5", f"train.resume={resume[1]}")
    assert resumed.run() is not None
    # Step 4 is taken again, and the updates that were skipped before it stay so.
    assert skipped(folder) == [0, 1, 1, 0, 0]


@pytest.mark.usefixtures("cached_rollouts")
def test_updates_of_one_rollout_count_once_and_what_was_learned_before_is_saved(make_run):
    def broken_at(*steps):
        now, hooks = [0], []

        def change(gradient):
            return gradient * torch.nan if now[0] in steps else gradient

        def at_step(models, step):
            now[0] = step
            if not hooks:
                hooks.append(models.policy.trainable_parameters()[-1].register_hook(change))

        return at_step

    passes = ("train.updates_per_rollout=3", "train.checkpoint_every=100")
    trainer, _, folder = make_run(*passes, "train.steps=4", at_step=broken_at(2, 4), folder="once")
    assert trainer.run() is not None
    assert skipped(folder) == [0, 3, 0, 3]

    trainer, models, folder = make_run(
        *passes, "train.steps=9", at_step=broken_at(2, 3, 4), folder="thrice"
    )
    message = fail(trainer, NonFiniteError)
    assert "in any update of 3 steps in a row" in message
    assert skipped(folder) == [0, 3, 3, 3]
    resume = re.search(r"step-000004: train\.resume=(\S+)$", message)
    assert resume is not None
    weights = load_checkpoint(folder.checkpoint_dir(4)).of("policy")
    assert are_equal(weights, dict(models.policy.state_tensors()))
    resumed, _, _ = make_run(*passes, "train.steps=9", f"train.resume={resume[1]}", folder="thrice")
    assert resumed.run() is not None
    assert skipped(folder) == [0, 3, 3, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("value", [torch.nan, pytest.param(-torch.inf, marks=pytest.mark.long)])
def test_a_score_that_is_not_finite_ends_a_run_that_goes_on_with_the_term_repaired(
    make_run, brightness, value
):
    refused = {}
    steps = []

    def spoil(scores, prompt):
        if steps and steps[-1] == 2:
            refused.setdefault("prompt", prompt.prompt_id)
            scores[1] = value
        return scores

    trainer, _, folder = make_run(
        "train.steps=2", term=brightness(spoil), at_step=lambda _, step: steps.append(step)
    )
    message = fail(trainer, RewardError)

    place = folder.failures_dir / "step-000002"
    assert message.startswith(
        f"term brightness, prompt {refused['prompt']}, image 1: returned {value}; a score must be "
        "a finite number"
    )
    assert message.endswith(
        f"Step 1 is saved; go on with train.resume={folder.path}. The pictures are in {place}"
    )
    assert len(list(place.glob("*.png"))) == 2
    assert [row["step"] for row in read_metrics(folder)] == [0, 1]

    resumed, _, _ = make_run("train.steps=2", "train.resume=auto")
    assert resumed.run() is not None
    assert [row["step"] for row in read_metrics(folder)] == [0, 1, 2]


def spoil_weight(value, at):
    """A fault of the memory: a weight that all logits depend on, before a step."""

    def at_step(models, step):
        if step == at:
            with torch.no_grad():
                models.policy.model.model.language_model.norm.weight[3] = value

    return at_step


@pytest.mark.parametrize(
    ("value", "truncation"),
    [(torch.nan, "top_p=null"), pytest.param(torch.inf, "top_p=0.9", marks=pytest.mark.long)],
)
def test_logits_that_are_not_finite_draw_no_token(make_run, value, truncation):
    trainer, _, folder = make_run(f"rollout.{truncation}", at_step=spoil_weight(value, at=3))

    message = fail(trainer, NonFiniteError)

    found = re.match(
        r"step 3: rollout: the log-probability of token 0 of prompt (\S+), sample 0 is nan "
        r"\((\d+) of (\d+) tokens are not finite\)",
        message,
    )
    assert found is not None
    assert found[2] == found[3]
    earlier = folder.checkpoint_dir(1)
    assert message.endswith(
        f"The last checkpoint from before is step-000001: train.resume={earlier}"
    )
    assert [row["step"] for row in read_metrics(folder)] == [0, 1, 2]
    assert not folder.image_dir(3).exists()


def test_logits_that_are_not_finite_end_an_evaluation(make_run):
    trainer, models, folder = make_run()
    spoil_weight(torch.nan, at=0)(models, 0)

    message = fail(trainer, NonFiniteError)

    assert message.startswith("step 0: evaluation: the log-probability of token 0 of prompt")
    assert message.endswith("Nothing was learned yet")
    assert read_metrics(folder) == []


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("transformer", "proj_out.bias", torch.nan),
        # The published pipeline cuts what is infinite to white, a picture like any other.
        ("vae", "decoder.conv_out.bias", torch.inf),
    ],
)
def test_pixels_that_are_not_finite_are_no_black_or_white_pictures(make_run, part, name, value):
    def at_step(models, step):
        modules = dict(zip(("text", "transformer", "vae"), models.decoder.modules(), strict=True))
        if step == 2:
            with torch.no_grad():
                modules[part].get_parameter(name)[0] = value

    trainer, _, folder = make_run("train.checkpoint_every=1000", at_step=at_step)

    message = fail(trainer, DecoderError)

    assert re.match(
        r"step 2: decode: pixels of prompt \S+, sample 0 are not finite; the decoder's", message
    )
    assert message.endswith(f"Step 1 is saved; go on with train.resume={folder.path}")
    assert not folder.image_dir(2).exists()
    assert load_checkpoint(newest_checkpoint(folder)).step == 1


def test_weights_that_an_update_made_infinite_are_not_saved(make_run):
    def overflow(optimizer, *_):
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].view(-1)[0] = torch.inf

    hooks = []

    def at_step(models, step):
        if step == 2:
            hooks.append(register_optimizer_step_post_hook(overflow))

    trainer, _, folder = make_run(at_step=at_step)
    try:
        message = fail(trainer, NonFiniteError)
    finally:
        hooks[0].remove()

    assert re.match(
        r"step 2: policy: \S+ holds values that are not finite, and is not sav", message
    )
    newest = newest_checkpoint(folder)
    assert newest == folder.checkpoint_dir(1)
    assert message.endswith(
        f"The last checkpoint from before is step-000001: train.resume={newest}"
    )
    assert [path.name for path in folder.checkpoints_dir.iterdir()] == ["step-000001"]


def replace_weight(path, value):
    """Puts a value into the first weight of a checkpoint that stays whole; the weight's name."""
    file = path / "policy.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    tensors[name].view(-1)[0] = value
    save_file(tensors, file)
    manifest = json.loads((path / "checkpoint.json").read_text())
    content = file.read_bytes()
    manifest["files"][file.name] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    del manifest["sha256"]
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    return name


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_checkpoint_with_a_weight_that_is_not_finite_is_refused(tmp_path, value):
    tensors = {"policy": {"a": torch.ones(3), "b": torch.ones(3)}, "optimizer": {}}
    path = save_checkpoint(RunFolder(tmp_path), step=1, tensors=tensors, metadata={})
    replace_weight(path, 2.0)
    assert load_checkpoint(path).tensors["policy"]["a"].tolist() == [2.0, 1.0, 1.0]

    replace_weight(path, value)

    file = re.escape(str(path / "policy.safetensors"))
    with pytest.raises(CheckpointError, match=f"{file}: a holds values that are not finite"):
        load_checkpoint(path)


def test_finite_scores_whose_sum_overflows_name_the_picture(make_run, brightness):
    trainer, _, folder = make_run(
        "train.steps=2", term=brightness(lambda scores, prompt: scores * 0 + 3e38), weight=2.0
    )

    message = fail(trainer, RewardError)

    assert "the total of prompt row 0, image 0 is inf, though every score is finite" in message
    assert "brightness 3e+38 (weight 2)" in message
    assert read_metrics(folder) == []


def test_scores_as_far_apart_as_floats_go_are_learned_from(make_run, brightness):
    def spread(scores, prompt):
        return torch.tensor([-3e38, 3e38])[: len(scores)]

    trainer, _, folder = make_run("train.steps=1", term=brightness(spread))

    assert trainer.run() is not None

    assert skipped(folder) == [0]


def test_an_infinite_divergence_from_the_reference_moves_no_weight(make_run):
    # k3 = exp(d) - d - 1 overflows in fp32 from d = 88.7 nats on.
    trainer, models, folder = make_run("loss.kl_coef=0.02", "loss.kl_estimator=k3")
    untrained = {name: each.clone() for name, each in models.policy.state_tensors().items()}
    near = models.policy.reference_log_probs
    models.policy.reference_log_probs = lambda *arguments: near(*arguments) + 90.0

    message = fail(trainer, NonFiniteError)

    assert "step 3: loss or gradient was not finite in any update of 3 steps in a row" in message
    assert skipped(folder) == [1, 1, 1]
    assert are_equal(untrained, dict(models.policy.state_tensors()))


def test_a_learning_rate_that_overflows_ends_the_run(make_run):
    # The weights stay finite, and their products do not.
    trainer, _, folder = make_run()
    # Beyond what the config takes.
    overflowing = LearningRate(
        trainer._learner.optimizer,
        peak=1e30,
        schedule="constant",
        warmup_updates=0,
        total_updates=1,
    )
    trainer._learner = replace(trainer._learner, learning_rate=overflowing)

    message = fail(trainer, NonFiniteError)

    assert re.match(r"step 2: rollout: .*There is no checkpoint from before step 1$", message)
    assert [row["step"] for row in read_metrics(folder)] == [0, 1]
