"""NaN and infinity, wherever a run computes: an update is skipped, or the run ends and says why."""

from __future__ import annotations

import re

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from glm_grpo.errors import DecoderError, NonFiniteError
from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.tables import read_metrics
from glm_grpo.terminal import explain
from rewards.types import RewardError
from tests.end_to_end.runs import Brightness


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


def test_three_broken_gradients_in_a_row_end_a_run_that_can_be_gone_on_with(make_run):
    broken = BrokenGradient(torch.inf, steps=[2, 3, 4])
    trainer, _, folder = make_run("train.steps=5", at_step=broken.at_step)

    message = fail(trainer, NonFiniteError)

    assert message.startswith(
        "step 4: loss or gradient was not finite in any update of 3 steps in a row"
    )
    resume = re.search(r"step-000003: glm-grpo train train\.resume=(\S+)$", message)
    assert resume is not None
    assert skipped(folder) == [0, 1, 1, 1]

    resumed, _, _ = make_run("train.steps=5", f"train.resume={resume[1]}")
    assert resumed.run() is not None
    # Step 4 is taken again, and the updates that were skipped before it stay so.
    assert skipped(folder) == [0, 1, 1, 0, 0]


def test_a_score_that_is_not_finite_ends_a_run_and_names_the_picture(make_run):
    refused = {}
    steps = []

    def spoil(scores, prompt):
        if steps and steps[-1] == 2:
            refused.setdefault("prompt", prompt.prompt_id)
            scores[1] = torch.nan
        return scores

    trainer, _, folder = make_run(
        "train.steps=2", term=Brightness(spoil), at_step=lambda _, step: steps.append(step)
    )
    message = fail(trainer, RewardError)

    place = folder.failures_dir / "step-000002"
    assert message.startswith(
        f"term brightness, prompt {refused['prompt']}, image 1: returned nan; a score must be "
        "a finite number"
    )
    assert message.endswith(
        f"Step 1 is saved; continue with glm-grpo train train.resume={folder.path}. "
        f"The images are in {place}"
    )
    assert len(list(place.glob("*.png"))) == 2
    assert [row["step"] for row in read_metrics(folder)] == [0, 1]


def spoil_weight(value, at):
    """A fault of the memory: a weight that all logits depend on, before a step."""

    def at_step(models, step):
        if step == at:
            with torch.no_grad():
                models.policy.model.model.language_model.norm.weight[3] = value

    return at_step


def test_logits_that_are_not_finite_draw_no_token(make_run):
    trainer, _, folder = make_run(at_step=spoil_weight(torch.nan, at=3))

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
        f"The last checkpoint from before is step-000001: glm-grpo train train.resume={earlier}"
    )
    assert [row["step"] for row in read_metrics(folder)] == [0, 1, 2]
    assert not folder.image_dir(3).exists()


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
    assert message.endswith(
        f"Step 1 is saved; continue with glm-grpo train train.resume={folder.path}"
    )
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
        r"step 2: policy: \S+ contains values that are not finite, and is not sav", message
    )
    newest = newest_checkpoint(folder)
    assert newest == folder.checkpoint_dir(1)
    assert message.endswith(
        f"The last checkpoint from before is step-000001: glm-grpo train train.resume={newest}"
    )
    assert [path.name for path in folder.checkpoints_dir.iterdir()] == ["step-000001"]


def test_finite_scores_whose_sum_overflows_name_the_picture(make_run):
    trainer, _, folder = make_run(
        "train.steps=2", term=Brightness(lambda scores, prompt: scores * 0 + 3e38), weight=2.0
    )

    message = fail(trainer, RewardError)

    assert "the total of prompt row 0, image 0 is inf, though every score is finite" in message
    assert "brightness 3e+38 (weight 2)" in message
    assert read_metrics(folder) == []


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
