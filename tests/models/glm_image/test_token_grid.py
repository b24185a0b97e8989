"""Sizes and positions, against values worked out by hand and the published code."""

from __future__ import annotations

import pytest
import torch
from diffusers import GlmImagePipeline

from glm_grpo.models.glm_image.token_grid import (
    generated_positions,
    target_token_ids,
    token_layout,
    upsample_token_ids,
)


@pytest.mark.parametrize(
    ("height", "width", "preview", "target"),
    [
        (128, 128, (16, 16), (4, 4)),
        (1024, 1024, (16, 16), (32, 32)),
        # sqrt(3/4) * 16 = 13.86, sqrt(4/3) * 16 = 18.48, both cut off.
        (768, 1024, (13, 18), (24, 32)),
        (1024, 512, (22, 11), (32, 16)),
    ],
)
def test_token_layout_gives_published_grids(height, width, preview, target):
    layout = token_layout(height, width)

    assert (layout.preview, layout.target) == (preview, target)
    assert layout.num_tokens == preview[0] * preview[1] + target[0] * target[1]


@pytest.mark.parametrize(("height", "width"), [(100, 128), (128, 0), (-32, 128), (128, 33)])
def test_token_layout_refuses_sides_that_are_no_multiple_of_32(height, width):
    with pytest.raises(ValueError, match="multiple of 32"):
        token_layout(height, width)


def test_generated_positions_count_inside_grids_and_advance_by_the_longer_side():
    layout = token_layout(32, 64)  # preview 11 x 22, target 1 x 2

    positions = generated_positions(layout, 7)

    assert layout.preview == (11, 22)
    assert positions[:, 0].tolist() == [7, 7, 7]
    assert positions[:, 21].tolist() == [7, 7, 28]
    assert positions[:, 22].tolist() == [7, 8, 7]
    assert positions[:, -2].tolist() == [29, 29, 29]  # 7 + 22
    assert positions[:, -1].tolist() == [29, 29, 30]


@pytest.mark.parametrize(("height", "width"), [(128, 128), (96, 160)])
def test_generated_positions_equal_those_of_the_published_model(random_pipeline, height, width):
    model = random_pipeline.vision_language_encoder.model
    target, preview = token_layout(height, width).target, token_layout(height, width).preview
    input_ids = torch.full((1, 9), 600)

    model.get_rope_index(
        input_ids,
        image_grid_thw=torch.tensor([[1, *target], [1, *preview]]),
        images_per_sample=torch.tensor([2]),
        attention_mask=torch.ones_like(input_ids),
    )

    ours = generated_positions(token_layout(height, width), 9)
    # The published table has one more column, for the end token.
    assert torch.equal(ours, model._cached_decode_position_ids[0, :, :-1])


def test_upsampled_target_tokens_equal_the_published_ones():
    layout = token_layout(64, 96)
    token_ids = torch.arange(layout.num_tokens)

    target = target_token_ids(token_ids, layout)

    assert target.tolist() == list(range(layout.num_preview, layout.num_tokens))
    published = GlmImagePipeline._upsample_token_ids(target, *layout.target)
    assert torch.equal(upsample_token_ids(target.unsqueeze(0), layout), published)
