"""The decoder draws what the stock pipeline draws."""

from __future__ import annotations

import pytest
import torch

from glm_grpo.models.glm_image.decoder import GlmImageDecoder, decoded_at_once
from glm_grpo.models.glm_image.token_grid import target_token_ids, token_layout, upsample_token_ids

LAYOUT = token_layout(128, 128)


@pytest.fixture
def token_ids():
    return torch.randint(512, (2, 3, 272), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("guidance_scale", [1.0, 1.5])
def test_drawn_group_equals_the_stock_pipeline(random_pipeline, batch, token_ids, guidance_scale):
    decoder = GlmImageDecoder(random_pipeline, steps=3, guidance_scale=guidance_scale)
    prior = upsample_token_ids(target_token_ids(token_ids, LAYOUT), LAYOUT)
    prompt, seed = batch.prompts[1], batch.decode_seeds[1]

    ours = decoder.decode_group(prompt.prompt, prior[1], seed, 128, 128)

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


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_group_drawn_in_parts_equals_the_group_drawn_at_once(
    random_pipeline, batch, token_ids, batch_size
):
    # Three in parts of 1, of 2 and 1, and in one part that is not full.
    prior = upsample_token_ids(target_token_ids(token_ids, LAYOUT), LAYOUT)[0]
    whole = GlmImageDecoder(random_pipeline, steps=3, guidance_scale=1.5)
    in_parts = GlmImageDecoder(random_pipeline, steps=3, guidance_scale=1.5, batch_size=batch_size)

    drawn = in_parts.decode_group(batch.prompts[0].prompt, prior, 5, 128, 128)

    assert torch.allclose(
        drawn, whole.decode_group(batch.prompts[0].prompt, prior, 5, 128, 128), atol=1e-5
    )


def test_decode_cuts_to_8_bits_and_keeps_the_axes(random_pipeline, batch, token_ids):
    decoder = GlmImageDecoder(random_pipeline, steps=2, guidance_scale=1.0)
    prior = upsample_token_ids(target_token_ids(token_ids, LAYOUT), LAYOUT)

    images = decoder.decode(batch, token_ids)

    drawn = decoder.decode_group(batch.prompts[0].prompt, prior[0], 5, 128, 128)
    assert images.pixels.shape == (2, 3, 3, 128, 128)
    assert images.decode_seeds == (5, 6)
    assert torch.equal(images.pixels[0], (drawn * 255).round().to(torch.uint8))


class WatchedDecoder(GlmImageDecoder):
    """Writes down what it draws."""

    def __init__(self, pipeline):
        super().__init__(pipeline, steps=2, guidance_scale=1.0)
        self.drawn = []

    def decode_group(self, prompt, *arguments):
        self.drawn.append(prompt)
        return super().decode_group(prompt, *arguments)


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


def test_with_steps_draws_as_a_decoder_of_so_many_steps(random_pipeline, batch, token_ids):
    decoder = GlmImageDecoder(random_pipeline, steps=3, guidance_scale=1.0)
    cheap = decoder.with_steps(1)
    expected = {
        steps: GlmImageDecoder(random_pipeline, steps=steps, guidance_scale=1.0).decode(
            batch, token_ids
        )
        for steps in (1, 3)
    }

    assert (cheap.steps, decoder.steps) == (1, 3)
    assert not torch.equal(expected[1].pixels, expected[3].pixels)
    assert torch.equal(cheap.decode(batch, token_ids).pixels, expected[1].pixels)
    assert torch.equal(decoder.decode(batch, token_ids).pixels, expected[3].pixels)
    assert cheap.modules() == decoder.modules()


@pytest.mark.parametrize(("guidance_scale", "texts"), [(1.0, 2), (1.5, 3)])
def test_a_text_is_encoded_once(random_pipeline, batch, token_ids, guidance_scale, texts):
    encoded = []
    random_pipeline.text_encoder.register_forward_hook(lambda *_: encoded.append(1))
    decoder = GlmImageDecoder(random_pipeline, steps=2, guidance_scale=guidance_scale)

    first = decoder.decode(batch, token_ids)
    # With guidance the empty text besides.
    assert len(encoded) == texts
    again = decoder.decode(batch, token_ids)
    decoder.with_steps(1).decode(batch, token_ids)

    assert len(encoded) == texts
    assert torch.equal(again.pixels, first.pixels)


def test_texts_of_several_prompts_are_not_padded_together(random_pipeline, batch):
    parts = GlmImageDecoder(random_pipeline, steps=1, guidance_scale=1.0)._pipeline
    texts = [prompt.prompt for prompt in batch.prompts]
    with pytest.raises(ValueError, match=r"2 different texts: .* decode one prompt at a time"):
        parts.encode_prompt(texts, False, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("group_size", [3, 4, 5])
def test_equal_tokens_of_a_group_give_equal_pictures(random_pipeline, batch, token_ids, group_size):
    # Sizes that go through the VAE in parts, and would leave a rest if parts had another size.
    same = token_ids[:, :1].expand(-1, group_size, -1)
    decoder = GlmImageDecoder(random_pipeline, steps=2, guidance_scale=1.0)

    pixels = decoder.decode(batch, same).pixels

    assert torch.equal(pixels, pixels[:, :1].expand_as(pixels))
    assert not torch.equal(pixels[0, 0], pixels[1, 0])


@pytest.mark.parametrize(
    ("pictures", "side", "expected"),
    [(8, 128, 2), (3, 128, 1), (8, 256, 1), (6, 64, 6), (9, 64, 3)],
)
def test_parts_that_go_through_the_vae_are_equal_and_few_pixels(pictures, side, expected):
    assert decoded_at_once(pictures, side, side) == expected


def test_decoding_keeps_no_gradient(random_pipeline, batch, token_ids):
    random_pipeline.transformer.requires_grad_(True)
    decoder = GlmImageDecoder(random_pipeline, steps=1, guidance_scale=1.0)
    prior = upsample_token_ids(target_token_ids(token_ids, LAYOUT), LAYOUT)

    assert not decoder.decode_group(batch.prompts[0].prompt, prior[0], 5, 128, 128).requires_grad
