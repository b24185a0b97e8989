"""Build a stock Janus and its processor in miniature, with fresh weights."""

from __future__ import annotations

import json

import numpy as np
import torch
from jaxtyping import Float32
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusProcessor,
)

from benchmarks import janus_folder
from glm_grpo.tiny.objects import world

WORDS = 384
"""Entries of the vocabulary that are no special tokens: 256 bytes and the world's words."""
_SPECIAL = 6
_CODE_SIZE = 8
_COLOUR_SIZE = 3

# What the published template makes of one message of a user.
_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|User|>: {{ message['content'][0]['text'] + '\n\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|Assistant|>:{%- endif -%}"
)


def build_config(codes: int) -> JanusConfig:
    """Sizes of the model, for images of 8 x 8 tokens.

    Args:
        codes: Entries of the visual codebook.
    """
    width = 160
    return JanusConfig(
        text_config={
            "vocab_size": WORDS + _SPECIAL,
            "hidden_size": width,
            "intermediate_size": 416,
            "num_hidden_layers": 5,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "bos_token_id": WORDS,
            "eos_token_id": WORDS + 1,
            "pad_token_id": WORDS + 2,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": world.SIZE,
            "patch_size": world.CELL,
            "projection_dim": width,
            "num_image_tokens": world.GRID**2,
        },
        vq_config={
            "embed_dim": _CODE_SIZE,
            "num_embeddings": codes,
            "num_patches": world.GRID,
            "latent_channels": 64,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 2, 2],
            "num_res_blocks": 1,
            "projection_dim": width,
            "image_token_embed_dim": width,
        },
        image_token_id=WORDS + 3,
        tie_word_embeddings=False,
    )


def build_processor(codes: int) -> JanusProcessor:
    """The published special tokens and template, and byte pairs that make up the world's words."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    captions = map(world.caption, world.all_requests())
    learned.train_from_iterator(
        (f"<|User|>: {caption}\n\n<|Assistant|>:" for caption in captions), trainer
    )
    merges = json.loads(learned.to_str())["model"]["merges"]
    return janus_folder.build_processor(
        build_config(codes), _TEMPLATE, [(left, right) for left, right in merges]
    )


def build_model(codes: int, *, seed: int) -> JanusForConditionalGeneration:
    """The whole model; the language model and its image heads are what will be trained."""
    config = build_config(codes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = JanusForConditionalGeneration(config).eval()
        inner = model.model
        aligner, head = inner.generation_aligner, inner.generation_head
        for linear in (aligner.fc1, *aligner.hidden_layers, head.proj_out):
            linear.weight.normal_(0, linear.in_features**-0.5)
        # So the shipped weights began; the class's own, which are smaller, learn about as well.
        for module in inner.vqmodel.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
        inner.vqmodel.quantize.embedding.weight.copy_(_codes(seed=seed))
        inner.generation_embeddings.weight.copy_(inner.vqmodel.quantize.embedding.weight)
    text = config.text_config
    model.generation_config = GenerationConfig(
        temperature=1.0,
        # The model draws best without guidance; at 1, stock `generate` fails.
        guidance_scale=1.001,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        generation_kwargs={"boi_token_id": config.image_token_id + 1},
    )
    return model


def _codes(*, seed: int) -> Float32[Tensor, "C 8"]:
    """Directions of the codebook: five numbers for the part of a shape, three for its colour.

    So what a colour looks like is learned once, and not for each of its cells.
    """
    parts, colours = world.cell_parts()
    distinct = sorted(set(parts))
    directions = _spread(len(distinct), _CODE_SIZE - _COLOUR_SIZE, seed=seed)
    axes = torch.cat([torch.eye(_COLOUR_SIZE), -torch.eye(_COLOUR_SIZE)])
    codes = torch.zeros(len(parts), _CODE_SIZE)
    for code, part, colour in zip(codes, parts, colours, strict=True):
        code[_COLOUR_SIZE:] = directions[distinct.index(part)]
        if colour >= 0:
            code[:_COLOUR_SIZE] = axes[colour]
    return functional.normalize(codes, dim=1)


def _spread(count: int, size: int, *, seed: int) -> Float32[Tensor, "count size"]:
    """Directions that are as far apart as they can be."""
    start = np.random.default_rng(seed).normal(size=(count, size))
    points = torch.tensor(start, dtype=torch.float32, requires_grad=True)
    optimizer = torch.optim.Adam([points], lr=0.02)
    with torch.enable_grad():
        for _ in range(400):
            unit = functional.normalize(points, dim=1)
            near = (unit @ unit.T - 2 * torch.eye(count)).mul(12).logsumexp(dim=1).mean()
            optimizer.zero_grad()
            near.backward()
            optimizer.step()
    return functional.normalize(points.detach(), dim=1)
