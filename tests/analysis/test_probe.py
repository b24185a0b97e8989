"""The probe on the embedded model, small enough for a test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from glm_grpo.analysis.probe import draw_probe
from glm_grpo.build import build_batch, build_prompts, build_stage, collect_settings
from glm_grpo.config import compose_config
from rewards.ssim import SsimReward

CONFIG_DIR = Path(__file__).parents[2] / "configs"
PROMPTS, GROUP, NOISES = 3, 3, 2


@pytest.fixture(scope="module")
def samples():
    config = compose_config(
        CONFIG_DIR,
        "tiny",
        [
            f"rollout.prompts_per_step={PROMPTS}",
            f"rollout.group_size={GROUP}",
            "train.micro_batch_size=3",
            "reward.terms.lpips=null",
            "reward.terms.aesthetic=null",
            "reward.terms.ocr.threads=1",
        ],
    )
    stage = build_stage(config, Accelerator().device, needs_reference=False)
    batch = build_batch(config, build_prompts(config).training, 0)
    return draw_probe(stage, [batch], collect_settings(config), noises=NOISES)


def test_draw_probe_scores_samples_noises_and_own_tokens(samples):
    assert samples.images.pixels.shape == (PROMPTS, GROUP, 3, 128, 128)
    assert samples.rewards.names == ("ssim", "ocr")
    assert samples.redrawn.shape == (PROMPTS, NOISES, 2)
    assert samples.own_tokens.shape == (PROMPTS, 2)
    assert samples.own_pixels.shape == (PROMPTS, 3, 128, 128)


def test_draw_probe_decodes_the_targets_own_tokens(samples):
    similarity = SsimReward().score(samples.prompts, samples.own_pixels)

    torch.testing.assert_close(samples.own_tokens[:, 0], similarity)
    # What the decoder makes of the right tokens is nearly the target; samples of the untrained
    # policy are not.
    assert similarity.min() > 0.9
    assert samples.own_tokens[:, 0].mean() > samples.rewards.raw[..., 0].mean()


def test_draw_probe_redraws_one_samples_tokens_under_other_noises(samples):
    spread = samples.redrawn[..., 0].amax(dim=1) - samples.redrawn[..., 0].amin(dim=1)
    distance = (samples.redrawn[..., 0] - samples.rewards.raw[:, :1, 0]).abs()

    # Another noise gives another picture, and the same tokens give nearly the same score.
    assert (spread > 0).all()
    assert distance.max() < 0.1
