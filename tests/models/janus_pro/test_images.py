"""Images of tokens are stock's to the level, and tokens of images those of the publication."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import normalize

from glm_grpo.errors import DecoderError
from glm_grpo.models.janus_pro.decoder import JanusProDecoder
from glm_grpo.models.janus_pro.prompt_inputs import image_tokens
from tests.janus_miniature import SIDE


@pytest.fixture(scope="module")
def token_ids():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(96, (3, 3, 16), generator=generator)


def test_images_are_those_of_stock_classes_to_the_level(loaded_janus, janus_batch, token_ids):
    decoder = JanusProDecoder(loaded_janus.model.model.vqmodel)
    images = decoder.decode(janus_batch, token_ids)
    for group, ids in zip(images.pixels, token_ids, strict=True):
        with torch.no_grad():
            values = loaded_janus.model.decode_image_tokens(ids).float()
        stock = loaded_janus.processor.postprocess(list(values), return_tensors="pt")
        assert torch.equal(group, stock["pixel_values"])
    assert images.pixels.float().std() > 10
    assert torch.equal(images.pixels, decoder.decode(janus_batch, token_ids).pixels)


def test_fewer_images_at_once_are_the_same_to_a_level(loaded_janus, janus_batch, token_ids):
    vqmodel = loaded_janus.model.model.vqmodel
    whole, single = (
        JanusProDecoder(vqmodel, batch_size=size).decode(janus_batch, token_ids).pixels.int()
        for size in (None, 2)
    )
    assert (whole - single).abs().max() <= 1


def test_a_image_that_is_not_finite_is_named(loaded_janus, janus_batch, token_ids):
    vqmodel = copy.deepcopy(loaded_janus.model.model.vqmodel)
    with torch.no_grad():
        vqmodel.quantize.embedding.weight[token_ids[1, 2, 0]] = torch.nan
    # No other image has this token.
    rest = token_ids.masked_fill(token_ids == token_ids[1, 2, 0], 0)
    rest[1, 2, 0] = token_ids[1, 2, 0]
    with pytest.raises(DecoderError, match="prompt long, sample 2"):
        JanusProDecoder(vqmodel, batch_size=2).decode(janus_batch, rest)


def test_a_image_outside_float16_is_explained(loaded_janus, janus_batch, token_ids):
    vqmodel = copy.deepcopy(loaded_janus.model.model.vqmodel).half()
    assert JanusProDecoder(vqmodel).decode(janus_batch, token_ids).pixels.float().std() > 10
    with torch.no_grad():
        for convolution in (vqmodel.post_quant_conv, vqmodel.decoder.conv_in):
            convolution.weight.fill_(6e4)
    with pytest.raises(DecoderError, match="65504.*model.dtype=bfloat16"):
        JanusProDecoder(vqmodel).decode(janus_batch, token_ids)


def test_tokens_are_the_codes_with_the_nearest_direction(loaded_janus):
    vqmodel = copy.deepcopy(loaded_janus.model.model.vqmodel)
    pixels = torch.randint(256, (5, 3, SIDE, SIDE), dtype=torch.uint8)
    found = image_tokens(vqmodel, pixels)

    with torch.no_grad():
        scaled = pixels.float() / 127.5 - 1
        latents = vqmodel.quant_conv(vqmodel.encoder(scaled)).permute(0, 2, 3, 1).flatten(1, 2)
        codes = normalize(vqmodel.quantize.embedding.weight, dim=-1)
        distances = torch.cdist(normalize(latents, dim=-1), codes.expand(5, -1, -1))
    assert torch.equal(found, distances.argmin(-1))
    # Stock compares lengths too; codes of one length make it agree.
    stock = vqmodel.encode(scaled).image_tokens.view(5, -1)
    assert not torch.equal(stock, found)
    with torch.no_grad():
        vqmodel.quantize.embedding.weight.copy_(codes)
    assert torch.equal(vqmodel.encode(scaled).image_tokens.view(5, -1), found)


def test_steps_cannot_be_changed(loaded_janus):
    decoder = JanusProDecoder(loaded_janus.model.model.vqmodel)
    assert decoder.steps is None
    with pytest.raises(ValueError, match="denoising steps"):
        decoder.with_steps(2)
