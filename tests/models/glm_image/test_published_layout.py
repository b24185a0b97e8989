"""The files of the published model, scaled down: read, sampled, replayed, drawn as stock does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.files import PUBLISHED_ID
from glm_grpo.models.glm_image.loading import load_pipeline
from glm_grpo.models.glm_image.planner import (
    build_part,
    read_part_configs,
    trained_side,
)
from glm_grpo.tiny import world
from glm_grpo.types import PromptBatch
from rewards.types import Prompt
from tests.published_layout import write_published_layout
from tests.stock import stock_image, stock_log_probs

PARAMETERS = {
    "vision_language_encoder": 10_114_245_632,
    "transformer": 6_926_882_880,
    "vae": 406_100_643,
    "text_encoder": 217_657_472,
}
"""Of the published parts."""


@pytest.fixture(scope="module")
def published(assets_dir):
    return assets_dir / "glm_image_published"


@pytest.fixture(scope="module")
def pipeline(published, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "published"
    write_published_layout(published, folder)
    return load_pipeline(str(folder), dtype=torch.float32)


@pytest.fixture(scope="module")
def policy(pipeline, build_policy):
    return build_policy(pipeline, adapter_rank=4)


@pytest.fixture(params=["images", "edits"])
def asked(request, policy):
    """Two prompts of unequal length, of which the shorter is padded with image-end tokens."""
    signs = world.signs_of_words(("KITE", "MOON"), seed=3)
    is_edit = request.param == "edits"
    sources = [(world.draw_sign(sign),) if is_edit else () for sign in signs]
    prompts = (
        Prompt("short", 'a "KITE"', sources=sources[0]),
        Prompt("long", 'a rather longer prompt, with the word "MOON" in it', sources=sources[1]),
    )
    height = 128 if is_edit else 96
    batch = PromptBatch(prompts, 2, height, 128, seed=11, decode_seeds=(5, 6))
    return policy.encode_sources(batch)


def one_of(batch, row):
    sources = batch.source_token_ids
    return replace(
        batch,
        prompts=batch.prompts[row : row + 1],
        decode_seeds=batch.decode_seeds[row : row + 1],
        source_token_ids=None if sources is None else sources[row : row + 1],
    )


def shapes_of(model):
    return {name: each.shape for name, each in model.named_parameters()}


def test_sizes_known_without_files_are_the_published_ones(published):
    known, stored = read_part_configs(PUBLISHED_ID), read_part_configs(str(published))
    for part, count in PARAMETERS.items():
        shapes = shapes_of(build_part(known, part))
        assert sum(shape.numel() for shape in shapes.values()) == count
        assert shapes == shapes_of(build_part(stored, part))
    assert trained_side(PUBLISHED_ID) == trained_side(str(published)) == 1024


def test_sampled_and_replayed_log_probs_and_images_are_the_stock_ones(pipeline, policy, asked):
    assert pipeline.processor.tokenizer.pad_token_id == policy.model.config.image_end_token_id
    rollout = policy.sample(asked)
    replayed = policy.replay(asked, rollout, torch.arange(4)).log_probs.unflatten(0, (2, 2))
    images = GlmImageDecoder(pipeline, steps=2, guidance_scale=1.5).decode(asked, rollout.token_ids)

    torch.testing.assert_close(replayed, rollout.log_probs, atol=1e-5, rtol=0)
    for row in range(2):
        # One prompt at a time, which stock classes do not pad.
        stock = stock_log_probs(policy, one_of(asked, row), rollout.token_ids[row, :1])
        torch.testing.assert_close(rollout.log_probs[row, :1], stock, atol=1e-5, rtol=0)
        drawn = stock_image(pipeline, asked, rollout, row, 1, guidance_scale=1.5, steps=2)
        gap = images.pixels[row, 1].int() - (drawn * 255).round().int()
        assert int(gap.abs().max()) <= 1
