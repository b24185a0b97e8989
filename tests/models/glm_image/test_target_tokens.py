"""Tokens of target images: the target grid, and the three kinds of preview before it."""

from __future__ import annotations

import pytest
import torch

from glm_grpo.models.glm_image.token_grid import token_layout


@pytest.fixture
def policy(make_policy):
    return make_policy()


def test_previews_are_zeros_the_targets_tokens_or_those_of_a_small_image(policy):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(256, (2, 3, 128, 128), dtype=torch.uint8, generator=generator)
    layout = token_layout(*targets.shape[-2:])
    of = {
        preview: policy.tokenize_images(targets, preview=preview)
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
    # At this size a preview is larger than its target: the image is made larger, too.
    side = 32 * layout.preview[0]
    large = torch.nn.functional.interpolate(
        targets.float(), [side, side], mode="bicubic", antialias=True
    )
    expected = policy.tokenize_images(large.round().clamp(0, 255).to(torch.uint8), num_sources=1)
    assert torch.equal(of["encode"][:, :n], expected)


@pytest.mark.parametrize("size", [(128, 96), (256, 256), (32, 64)])
@pytest.mark.parametrize("preview", ["encode", "repeat"])
def test_images_of_every_size_have_the_tokens_that_are_generated(policy, size, preview):
    pixels = torch.zeros(1, 3, *size, dtype=torch.uint8)
    expected = token_layout(*size).num_tokens
    assert policy.tokenize_images(pixels, preview=preview).shape == (1, expected)
    # The published processor enlarges what is smaller than 512 x 512 pixels.
    policy.processor.image_processor.size = {
        "shortest_edge": 512**2,
        "longest_edge": 2048**2,
    }
    assert policy.tokenize_images(pixels, preview=preview).shape == (1, expected)
