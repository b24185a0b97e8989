"""A Janus-Pro of stock classes that a test makes in a second: few layers, random weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusProcessor,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
)

from benchmarks import janus_folder

SIDE = 32
"""Height and width of the images, pixels."""

# What the published template makes of one message of a user.
TEMPLATE = (
    "{%- for message in messages -%}"
    "<|User|>: {{ message['content'][0]['text'] + '\n\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|Assistant|>:{%- endif -%}"
)


def build_config(
    *, side: int = 4, codes: int = 96, layers: int = 2, width: int = 64
) -> JanusConfig:
    """Sizes of a model of `side` x `side` tokens, 8 x 8 pixels each.

    Special tokens have the ids behind the 256 bytes; a few more rows are not used.
    """
    text = LlamaConfig(
        vocab_size=268,
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    vision = JanusVisionConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8 * side,
        patch_size=8,
        projection_dim=width,
        num_image_tokens=side**2,
    )
    vq = JanusVQVAEConfig(
        embed_dim=8,
        num_embeddings=codes,
        latent_channels=64,
        base_channels=64,
        channel_multiplier=[1, 1, 1, 1],
        num_res_blocks=1,
        projection_dim=width,
        image_token_embed_dim=width,
    )
    return JanusConfig(
        text_config=text,
        vision_config=vision,
        vq_config=vq,
        image_token_id=259,
        tie_word_embeddings=False,
    )


def build_processor(template: str = TEMPLATE) -> JanusProcessor:
    """Bytes as tokens, with the published special tokens."""
    return janus_folder.build_processor(build_config(), template)


def build_model(
    *,
    side: int = 4,
    codes: int = 96,
    layers: int = 2,
    width: int = 64,
    spread: float = 2.0,
) -> JanusForConditionalGeneration:
    """A model of `side` x `side` tokens, 8 x 8 pixels each.

    Weights are scaled so that logits differ by prompt and place: with those that the class begins
    with, every distribution is uniform, and a wrong replay would not be seen.

    Args:
        spread: Standard deviation of the logits.
    """
    config = build_config(side=side, codes=codes, layers=layers, width=width)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = JanusForConditionalGeneration(config).eval()
        inner = model.model
        inner.language_model.embed_tokens.weight.normal_()
        inner.generation_embeddings.weight.normal_()
        aligner, head = inner.generation_aligner, inner.generation_head
        for linear in (aligner.fc1, *aligner.hidden_layers, head.proj_out):
            linear.weight.normal_(0, linear.in_features**-0.5)
        head.vision_head.weight.normal_(0, spread * (2.2 / width) ** 0.5)
        head.vision_head.bias.normal_(0, 0.2)
        # Of unequal lengths, so that only directions find the published tokens.
        codebook = inner.vqmodel.quantize.embedding.weight.normal_()
        codebook *= torch.rand(codes, 1) + 0.5
    text = config.text_config
    model.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        generation_kwargs={"boi_token_id": config.image_token_id + 1},
    )
    return model


def paint_colours(model: JanusForConditionalGeneration) -> None:
    """Change the decoder so that code k draws a patch of colour k % 8: bits red, green and blue.

    Blocks are passed through, and a colour is carried by pairs of channels of opposite sign, one
    pair a group of the last norm, which leaves their signs.
    """
    vqmodel = model.model.vqmodel
    decoder, codebook = vqmodel.decoder, vqmodel.quantize.embedding.weight
    with torch.no_grad():
        for parameter in [*decoder.parameters(), *vqmodel.post_quant_conv.parameters()]:
            parameter.zero_()
        codes = torch.arange(len(codebook))
        bits = (codes.unsqueeze(1) >> torch.arange(3)) % 2
        # Other numbers than the colour's tell codes of one colour apart, at the same length.
        angles = codes // 8
        codebook.zero_()
        codebook[:, :3] = 2.0 * bits - 1.0
        codebook[:, 3], codebook[:, 4] = angles.cos(), angles.sin()
        for colour in range(3):
            vqmodel.post_quant_conv.weight[2 * colour, colour] = 1.0
            vqmodel.post_quant_conv.weight[2 * colour + 1, colour] = -1.0
            decoder.conv_out.weight[colour, 2 * colour, 1, 1] = 1.0
            decoder.conv_out.weight[colour, 2 * colour + 1, 1, 1] = -1.0
        for module in decoder.modules():
            if type(module).__name__ == "JanusVQVAEConvUpsample":
                torch.nn.init.dirac_(module.conv.weight)
        torch.nn.init.dirac_(decoder.conv_in.weight)
        decoder.norm_out.weight.fill_(1.0)


@cache
def write_folder(parent: Path, *, paints: bool = False, spread: float = 2.0) -> Path:
    """The model in the published layout.

    Args:
        paints: See `paint_colours`.
        spread: See `build_model`.
    """
    folder = parent / ("painting" if paints else "janus")
    model = build_model(spread=spread)
    if paints:
        paint_colours(model)
    model.save_pretrained(folder)
    build_processor().save_pretrained(folder)
    return folder
