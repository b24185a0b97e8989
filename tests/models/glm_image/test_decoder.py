"""The decoder draws what the stock pipeline draws."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from glm_grpo.errors import DecoderError
from glm_grpo.models.glm_image.decoder import GlmImageDecoder, decoded_at_once
from glm_grpo.models.glm_image.token_grid import target_token_ids, token_layout, upsample_token_ids
from rewards.types import Prompt

LAYOUT = token_layout(128, 128)


@pytest.fixture
def token_ids():
    return torch.randint(512, (2, 3, 272), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("guidance_scale", "height", "width"), [(1.0, 128, 128), (1.5, 64, 96)])
def test_drawn_group_equals_the_stock_pipeline(
    loaded_pipeline, batch, guidance_scale, height, width
):
    decoder = GlmImageDecoder(loaded_pipeline, steps=3, guidance_scale=guidance_scale)
    layout = token_layout(height, width)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(512, (3, layout.num_tokens), generator=generator)
    prior = upsample_token_ids(target_token_ids(token_ids, layout), layout)
    prompt, seed = batch.prompts[1], batch.decode_seeds[1]

    (ours,) = decoder.decode_pixels([prompt.prompt], prior[None], [seed], height, width)

    for index in range(3):
        stock = loaded_pipeline(
            prompt=prompt.prompt,
            prior_token_ids=prior[index : index + 1],
            generator=torch.Generator().manual_seed(seed),
            height=height,
            width=width,
            num_inference_steps=3,
            guidance_scale=guidance_scale,
            output_type="pt",
        ).images[0]
        assert torch.allclose(ours[index], stock, atol=1e-5)


def test_decode_cuts_to_8_bits_and_keeps_the_axes(random_pipeline, batch, token_ids):
    decoder = GlmImageDecoder(random_pipeline, steps=1, guidance_scale=1.0)
    prior = upsample_token_ids(target_token_ids(token_ids, LAYOUT), LAYOUT)

    images = decoder.decode(batch, token_ids)

    (drawn,) = decoder.decode_pixels([batch.prompts[0].prompt], prior[:1], [5], 128, 128)
    assert images.pixels.shape == (2, 3, 3, 128, 128)
    assert images.decode_seeds == (5, 6)
    assert torch.equal(images.pixels[0], (drawn * 255).round().to(torch.uint8))


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("transformer", "proj_out.bias", torch.nan),
        # The published pipeline cuts what is infinite to white, an image like any other.
        ("vae", "decoder.conv_out.bias", torch.inf),
    ],
)
def test_pixels_that_are_not_finite_are_no_black_or_white_images(
    random_pipeline, batch, token_ids, part, name, value
):
    pipeline = copy.deepcopy(random_pipeline)
    with torch.no_grad():
        getattr(pipeline, part).get_parameter(name)[0] = value

    with pytest.raises(DecoderError, match="prompt .*, sample 0 "):
        GlmImageDecoder(pipeline, steps=1, guidance_scale=1.0).decode(batch, token_ids)


def test_group_drawn_in_parts_equals_the_group_drawn_at_once(random_pipeline, batch, token_ids):
    # Three in parts of 2 and 1.
    prior = upsample_token_ids(target_token_ids(token_ids, LAYOUT), LAYOUT)[:1]
    drawn, whole = (
        GlmImageDecoder(
            random_pipeline, steps=2, guidance_scale=1.5, batch_size=size
        ).decode_pixels([batch.prompts[0].prompt], prior, [5], 128, 128)
        for size in (2, None)
    )

    assert torch.allclose(drawn, whole, atol=1e-5)


class WatchedDecoder(GlmImageDecoder):
    """Writes down what it draws at once."""

    def __init__(self, pipeline, **options):
        super().__init__(pipeline, steps=1, guidance_scale=1.0, **options)
        self.drawn = []

    def decode_pixels(self, texts, *arguments):
        self.drawn.append(texts)
        return super().decode_pixels(texts, *arguments)


def test_groups_are_handed_out_as_they_are_drawn(random_pipeline, batch, token_ids):
    decoder = WatchedDecoder(random_pipeline)
    short, long = (prompt.prompt for prompt in batch.prompts)

    groups = decoder.decode_groups(batch, token_ids)

    assert decoder.drawn == []
    first = next(groups)
    assert decoder.drawn == [[short]]
    assert torch.is_grad_enabled()
    (second,) = groups
    assert decoder.drawn == [[short], [long]]
    assert torch.equal(torch.stack([first, second]), decoder.decode(batch, token_ids).pixels)
    assert first.device.type == "cpu"


def test_groups_with_glyphs_of_equal_length_are_drawn_together(random_pipeline, batch):
    quoted = ("AB", "EFG", "CD", "GH", "KLM", "IJ", "NO")
    texts = [f'a sign "{text}"' for text in quoted]
    prompts = tuple(Prompt(str(place), text) for place, text in enumerate(texts))
    several = replace(batch, prompts=prompts, group_size=2, decode_seeds=(*range(len(texts)),))
    token_ids = torch.randint(512, (7, 2, 272), generator=torch.Generator().manual_seed(1))
    decoder = WatchedDecoder(random_pipeline, joined_size=6)

    joined = decoder.decode(several, token_ids).pixels

    places = [[texts.index(text) for text in drawn] for drawn in decoder.drawn]
    assert places == [[0, 2, 3], [1, 4], [5, 6]]
    one_by_one = WatchedDecoder(random_pipeline).decode(several, token_ids).pixels
    difference = (joined.int() - one_by_one.int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() < 1e-4


def test_groups_are_joined_to_no_more_than_the_batch_size(random_pipeline, batch, token_ids):
    same = replace(batch, prompts=batch.prompts[:1] * 2)
    decoder = WatchedDecoder(random_pipeline, joined_size=6, batch_size=5)

    decoder.decode(same, token_ids)

    assert [len(texts) for texts in decoder.drawn] == [1, 1]


def test_rotary_tables_are_those_of_the_transformer(random_pipeline, batch, token_ids, monkeypatch):
    decoder = GlmImageDecoder(random_pipeline, steps=2, guidance_scale=1.5)
    made = []
    random_pipeline.transformer.rope.register_forward_hook(lambda *_: made.append(1))

    drawn = decoder.decode(batch, token_ids).pixels

    assert len(made) == 1
    monkeypatch.setattr(decoder._transformer, "_rotary_tables", lambda hidden_states: None)
    assert torch.equal(drawn, decoder.decode(batch, token_ids).pixels)
    assert len(made) == 1 + 2 * 2 * 2


def test_a_size_for_the_vae_changes_rounding_alone(random_pipeline, batch, token_ids):
    four = token_ids[:, [0, 1, 2, 0]]
    pixels, others = (
        GlmImageDecoder(random_pipeline, steps=1, guidance_scale=1.0, vae_batch_size=size)
        .decode(batch, four)
        .pixels
        for size in (4, 1)
    )

    assert (pixels.int() - others.int()).abs().max() <= 1
    assert torch.equal(pixels[:, 0], pixels[:, 3])


def test_with_steps_draws_as_a_decoder_of_so_many_steps(random_pipeline, batch, token_ids):
    decoder = GlmImageDecoder(random_pipeline, steps=2, guidance_scale=1.0)
    cheap = decoder.with_steps(1)
    one, two = (
        GlmImageDecoder(random_pipeline, steps=steps, guidance_scale=1.0).decode(batch, token_ids)
        for steps in (1, 2)
    )

    assert (cheap.steps, decoder.steps) == (1, 2)
    assert not torch.equal(one.pixels, two.pixels)
    assert torch.equal(cheap.decode(batch, token_ids).pixels, one.pixels)
    assert torch.equal(decoder.decode(batch, token_ids).pixels, two.pixels)
    assert cheap.modules() == decoder.modules()


def test_a_text_is_encoded_once(random_pipeline, batch, token_ids):
    encoded = []
    random_pipeline.text_encoder.register_forward_hook(lambda *_: encoded.append(1))
    decoder = GlmImageDecoder(random_pipeline, steps=1, guidance_scale=1.5)

    first = decoder.decode(batch, token_ids)
    again = decoder.decode(batch, token_ids)

    # Two prompts, and for guidance the empty text.
    assert len(encoded) == 3
    assert torch.equal(again.pixels, first.pixels)


def test_texts_of_several_prompts_are_not_padded_together(random_pipeline, batch):
    parts = GlmImageDecoder(random_pipeline, steps=1, guidance_scale=1.0)._pipeline
    texts = [prompt.prompt for prompt in batch.prompts]
    with pytest.raises(ValueError, match="2 different texts"):
        parts.encode_prompt(texts, False, device=torch.device("cpu"), dtype=torch.float32)


def test_equal_tokens_of_a_group_give_equal_images(random_pipeline, batch, token_ids):
    # Four go through the VAE in two parts.
    same = token_ids[:, :1].expand(-1, 4, -1)
    decoder = GlmImageDecoder(random_pipeline, steps=1, guidance_scale=1.0)

    pixels = decoder.decode(batch, same).pixels

    assert torch.equal(pixels, pixels[:, :1].expand_as(pixels))
    assert not torch.equal(pixels[0, 0], pixels[1, 0])


@pytest.mark.parametrize(
    ("images", "side", "most", "expected"),
    [
        (8, 128, None, 2),
        (3, 128, None, 1),
        (8, 256, None, 1),
        (9, 64, None, 3),
        (8, 1024, 4, 4),
        (8, 1024, 3, 2),
        (6, 128, 1, 1),
    ],
)
def test_parts_that_go_through_the_vae_have_one_size(images, side, most, expected):
    assert decoded_at_once(images, side, side, most) == expected


def test_decoding_keeps_no_gradient(random_pipeline, batch, token_ids):
    random_pipeline.transformer.requires_grad_(True)
    decoder = GlmImageDecoder(random_pipeline, steps=1, guidance_scale=1.0)
    prior = upsample_token_ids(target_token_ids(token_ids, LAYOUT), LAYOUT)

    assert not decoder.decode_pixels(
        [batch.prompts[0].prompt], prior[:1], [5], 128, 128
    ).requires_grad
