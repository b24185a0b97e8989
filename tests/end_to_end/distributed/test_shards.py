"""Full fine-tuning on shards (FSDP2) and on copies (DDP), and checkpoints across them."""

from __future__ import annotations

import shutil

import pytest
import torch

from glm_grpo.run.checkpoints import load_checkpoint
from tests.end_to_end.distributed.conftest import (
    SHARDS,
    Launcher,
    assert_same_metrics,
    files_of,
    metrics_of,
)

pytestmark = [pytest.mark.timeout(900)]

# One held-out prompt for two processes, which have four images and two.
FULL = (
    "model.adapter=null",
    "train.steps=2",
    "train.keep_checkpoints=9",
    "train.micro_batch_size=1",
    "sft.weight=0.1",
    *("data.path=tiny:train", "ssim=0.2"),
    "data.eval_path=held_out_one.txt",
)
MIXED = {**SHARDS, "ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.fixture(scope="module")
def launcher(launcher):
    launcher.write_prompts("held_out_one.txt", "blue", ["NO"])
    return launcher


@pytest.fixture(scope="module")
def one(launcher):
    return launcher.run("one", *FULL, "train.micro_batch_size=6")


@pytest.fixture(scope="module")
def shards(launcher):
    return launcher.run("shards", *FULL, processes=2, env=SHARDS)


def went_on(launcher: Launcher, run, name, *overrides, step, **how):
    """What becomes of a run from a step on, in a copy of its folder."""
    shutil.copytree(run, launcher.folder / name)
    resume = f"train.resume={launcher.folder / name / 'checkpoints' / f'step-{step:06d}'}"
    return launcher.run(name, *FULL, *overrides, resume, **how)


def assert_same_checkpoint(run, expected, *, step=2):
    """Weights and moments."""
    name = f"step-{step:06d}"
    ours, theirs = (load_checkpoint(each / "checkpoints" / name) for each in (run, expected))
    assert ours.metadata["updates"] == theirs.metadata["updates"] == step
    for stem in ("policy", "optimizer"):
        own, other = ours.tensors[stem], theirs.tensors[stem]
        assert own.keys() == other.keys()
        for key, tensor in other.items():
            assert own[key].dtype == tensor.dtype, key
            # Adam moves a weight whose gradient is near 0 by the learning rate, either way.
            torch.testing.assert_close(own[key], tensor, atol=1e-4, rtol=1e-3)


def test_shards_give_the_figures_of_one_process(one, shards):
    assert_same_metrics(shards, one)
    assert files_of(shards) == files_of(one)
    # The policy moved: there is something to be equal in.
    assert metrics_of(one)[-1]["kl/reference"] > 1e-5
    assert_same_checkpoint(shards, one)


@pytest.mark.long
def test_shards_go_on_from_a_checkpoint_of_one_process(launcher, one):
    resumed = went_on(launcher, one, "shards-after-one", step=1, processes=2, env=SHARDS)
    assert_same_metrics(resumed, one)
    assert_same_checkpoint(resumed, one)


@pytest.mark.long
def test_shards_that_compute_in_bf16_go_on_from_their_own_checkpoint(launcher):
    whole = launcher.run("mixed", *FULL, processes=2, env=MIXED)
    # That it came so far says that the self-check passed.
    assert 0 < metrics_of(whole)[1]["policy/replay_gap"] < 0.02
    saved = load_checkpoint(whole / "checkpoints" / "step-000002").tensors["policy"]
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    # Updates are smaller than what bf16 can tell apart.
    assert any(not torch.equal(t, t.bfloat16().float()) for t in saved.values())
    resumed = went_on(launcher, whole, "mixed-resumed", step=1, processes=2, env=MIXED)
    assert_same_metrics(resumed, whole)
    assert_same_checkpoint(resumed, whole)
