"""The probe on the embedded model, small enough for a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from glm_grpo.builders.models import build_models
from glm_grpo.builders.prompts import build_batch, build_prompts
from glm_grpo.builders.settings import collect_settings
from glm_grpo.config import compose_config
from glm_grpo.errors import MemoryLimitError
from glm_grpo.probe.command import _probed_batches
from glm_grpo.probe.probe import report_probe, sample_probe
from glm_grpo.training.data.prompts import part_of_batch
from rewards.terms.ssim import SsimReward

CONFIG_DIR = Path(__file__).parents[2] / "configs"
PROMPTS, GROUP, NOISES = 3, 3, 2


@pytest.fixture(scope="module")
def probed():
    """Stage, batch and settings of a probe."""
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
    models = build_models(config, Accelerator().device, needs_reference=False)
    batch = build_batch(config, build_prompts(config).training, 0)
    return models, batch, collect_settings(config)


@pytest.fixture(scope="module")
def samples(probed):
    models, batch, settings = probed
    return sample_probe(models, [batch], settings, noises=NOISES)


def test_draw_probe_scores_samples_noises_and_reconstruction(samples):
    assert samples.images.pixels.shape == (PROMPTS, GROUP, 3, 128, 128)
    assert samples.rewards.names == ("ssim", "ocr")
    assert samples.redrawn.shape == (PROMPTS, NOISES, 2)
    assert samples.reconstruction.shape == (PROMPTS, 2)
    assert samples.reconstructed_pixels.shape == (PROMPTS, 3, 128, 128)


def test_a_prompt_is_sampled_alike_in_a_smaller_batch(probed, samples):
    models, batch, settings = probed
    fewer = sample_probe(models, [part_of_batch(batch, range(2))], settings, noises=NOISES)
    torch.testing.assert_close(fewer.rewards.raw, samples.rewards.raw[:2])


@pytest.mark.parametrize(
    ("asked", "sizes"), [(1, [1]), (4, [3, 1]), (6, [3, 3]), (7, [3, 3, 1]), (10**9, [3, 3, 1])]
)
def test_probe_samples_as_many_prompts_as_asked_or_all_there_are(tmp_path, caplog, asked, sizes):
    caplog.set_level("INFO", logger="glm_grpo")
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f'a sign that says "{word}"\n' for word in "ABCDEFG"))
    overrides = [f"data.path={path}", f"rollout.prompts_per_step={PROMPTS}", "rollout.group_size=2"]
    config = compose_config(CONFIG_DIR, "tiny", [*overrides, "train.micro_batch_size=6"])
    prompts = build_prompts(config).training
    batches = _probed_batches(config, prompts, asked)
    assert [len(batch.prompts) for batch in batches] == sizes
    whole = build_batch(config, prompts, 0)
    assert batches[0].decode_seeds == whole.decode_seeds[: sizes[0]]
    told = ["--prompts 1000000000: there are 7, and all are sampled"] if asked > 7 else []
    assert caplog.messages == told


def test_draw_probe_decodes_the_targets_reconstruction(samples):
    similarity = SsimReward().score(samples.prompts, samples.reconstructed_pixels)

    torch.testing.assert_close(samples.reconstruction[:, 0], similarity)
    # What the decoder makes of the right tokens is nearly the target; samples of the untrained
    # policy are not.
    assert similarity.min() > 0.9
    assert samples.reconstruction[:, 0].mean() > samples.rewards.raw[..., 0].mean()


def test_draw_probe_redraws_one_samples_tokens_under_other_noises(samples):
    spread = samples.redrawn[..., 0].amax(dim=1) - samples.redrawn[..., 0].amin(dim=1)
    distance = (samples.redrawn[..., 0] - samples.rewards.raw[:, :1, 0]).abs()

    # Another noise gives another picture, and the same tokens give nearly the same score.
    assert (spread > 0).all()
    assert distance.max() < 0.1


def test_draw_probe_decodes_cheap_rollouts_once_more_in_full(probed, samples):
    models, batch, settings = probed
    cheap = sample_probe(models, [batch], replace(settings, decode_steps=1), noises=NOISES)

    assert samples.full is None
    assert (cheap.full.cheap_steps, cheap.full.steps, cheap.full.timed_images) == (1, 4, GROUP)
    assert torch.equal(cheap.full.rewards.raw, samples.rewards.raw)
    # The samples, their noises and the targets' own tokens are drawn as rollouts are.
    for name in ("redrawn", "reconstruction"):
        difference = (getattr(cheap, name) - getattr(samples, name)).abs()
        assert 0 < difference.nan_to_num().max() < 0.1
    report = report_probe(cheap, mode="weighted_sum", shares=None, min_rank_correlation=0.9)
    assert len(report.decode.rank_correlations) == len(samples.rewards.names)
    assert report.decode.total_rank_correlation > 0.8
    assert min(report.decode.images_per_second, report.decode.full_images_per_second) > 0


@pytest.mark.parametrize(
    ("function", "size"),
    [
        ("sample", f"{PROMPTS} prompts x {GROUP} images of 128 x 128 pixels"),
        ("tokenize_pictures", f"{PROMPTS} prompts x 1 images of 128 x 128 pixels"),
    ],
)
def test_draw_probe_says_on_what_memory_ran_out(probed, monkeypatch, function, size):
    models, batch, settings = probed
    monkeypatch.setattr(type(models.policy), function, run_out_of_memory)
    with pytest.raises(MemoryLimitError, match=f"out of memory in the rollout phase: {size}"):
        sample_probe(models, [batch], settings, noises=NOISES)


def test_decode_in_full_says_on_what_memory_ran_out(probed, monkeypatch):
    models, batch, settings = probed
    # What is decoded to be scored is handed out group by group, by another method.
    monkeypatch.setattr(type(models.decoder), "decode", run_out_of_memory)
    size = f"a group of {GROUP} images of 128 x 128 pixels"
    with pytest.raises(MemoryLimitError, match=f"out of memory in the decode phase: {size}"):
        sample_probe(models, [batch], replace(settings, decode_steps=1), noises=NOISES)


def run_out_of_memory(*_, **__):
    raise MemoryError


def test_report_probe_has_no_decode_where_rollouts_are_decoded_in_full(samples):
    report = report_probe(samples, mode="weighted_sum", shares=None, min_rank_correlation=0.9)
    assert report.decode is None
