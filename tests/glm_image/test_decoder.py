"""The decoder draws what the stock pipeline draws."""

from __future__ import annotations

import pytest
import torch

from glm_grpo.glm_image.decoder import Decoder
from glm_grpo.glm_image.token_grid import target_token_ids, token_layout, upsample_token_ids

LAYOUT = token_layout(128, 128)


@pytest.fixture
def token_ids():
    return torch.randint(512, (2, 3, 272), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("guidance_scale", [1.0, 1.5])
def test_drawn_group_equals_the_stock_pipeline(random_pipeline, batch, token_ids, guidance_scale):
    decoder = Decoder(random_pipeline, steps=3, guidance_scale=guidance_scale)
    prior = upsample_token_ids(target_token_ids(token_ids, LAYOUT), LAYOUT)
    prompt, seed = batch.prompts[1], batch.decode_seeds[1]

    ours = decoder.draw_group(prompt.prompt, prior[1], seed, 128, 128)

    for index in range(3):
        stock = random_pipeline(
            prompt=prompt.prompt,
            prior_token_ids=prior[1, index : index + 1],
            generator=torch.Generator().manual_seed(seed),
            height=128,
            width=128,
            num_inference_steps=3,
            guidance_scale=guidance_scale,
            output_type="pt",
        ).images[0]
        assert torch.allclose(ours[index], stock, atol=1e-5)


def test_decode_cuts_to_8_bits_and_keeps_the_axes(random_pipeline, batch, token_ids):
    decoder = Decoder(random_pipeline, steps=2, guidance_scale=1.0)
    prior = upsample_token_ids(target_token_ids(token_ids, LAYOUT), LAYOUT)

    images = decoder.decode(batch, token_ids)

    drawn = decoder.draw_group(batch.prompts[0].prompt, prior[0], 5, 128, 128)
    assert images.pixels.shape == (2, 3, 3, 128, 128)
    assert images.decode_seeds == (5, 6)
    assert torch.equal(images.pixels[0], (drawn * 255).round().to(torch.uint8))


class WatchedDecoder(Decoder):
    """Writes down what it draws."""

    def __init__(self, pipeline):
        super().__init__(pipeline, steps=2, guidance_scale=1.0)
        self.drawn = []

    def draw_group(self, prompt, *arguments):
        self.drawn.append(prompt)
        return super().draw_group(prompt, *arguments)


def test_groups_are_handed_out_as_they_are_drawn(random_pipeline, batch, token_ids):
    decoder = WatchedDecoder(random_pipeline)
    short, long = (prompt.prompt for prompt in batch.prompts)

    groups = decoder.decode_groups(batch, token_ids)

    assert decoder.drawn == []
    first = next(groups)
    assert decoder.drawn == [short]
    assert torch.is_grad_enabled()
    (second,) = groups
    assert decoder.drawn == [short, long]
    assert torch.equal(torch.stack([first, second]), decoder.decode(batch, token_ids).pixels)
    assert first.device.type == "cpu"


def test_equal_tokens_of_a_group_give_equal_pictures(random_pipeline, batch, token_ids):
    same = token_ids[:, :1].expand(-1, 3, -1)
    decoder = Decoder(random_pipeline, steps=2, guidance_scale=1.0)

    pixels = decoder.decode(batch, same).pixels

    assert torch.equal(pixels[0, 0], pixels[0, 2])
    assert not torch.equal(pixels[0, 0], pixels[1, 0])


def test_decoding_keeps_no_gradient(random_pipeline, batch, token_ids):
    random_pipeline.transformer.requires_grad_(True)
    decoder = Decoder(random_pipeline, steps=1, guidance_scale=1.0)
    prior = upsample_token_ids(target_token_ids(token_ids, LAYOUT), LAYOUT)

    assert not decoder.draw_group(batch.prompts[0].prompt, prior[0], 5, 128, 128).requires_grad
