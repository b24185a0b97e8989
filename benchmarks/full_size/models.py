"""Create GLM-Image with random weights on its device: no download, no copy in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from torch import nn
from transformers import (
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageProcessor,
    T5Config,
    T5EncoderModel,
)

from glm_grpo.models.glm_image.planner import PartConfigs
from glm_grpo.tiny.models import (
    PolicySizes,
    build_glyph_tokenizer,
    build_processor,
    build_scheduler,
)

PARTS = (
    "tokenizer",
    "processor",
    "text_encoder",
    "vision_language_encoder",
    "vae",
    "transformer",
    "scheduler",
)


def random_language_part(
    configs: PartConfigs, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Create the language model, and a byte-level processor with matching ids."""
    settings = GlmImageConfig.from_dict(configs.language)
    with made_on(device, dtype):
        model = GlmImageForConditionalGeneration(settings)
    # If an end token were sampled early, the stock pipeline would sample fewer tokens than ours.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = settings.image_start_token_id
    return {
        "vision_language_encoder": _frozen(model),
        "processor": _processor_of(settings),
    }


def random_decoder_part(
    configs: PartConfigs, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Create diffusion transformer, VAE and glyph encoder, with what they need."""
    vae_config = dict(configs.vae)
    channels = vae_config["latent_channels"]
    # The plan's published sizes omit them, because they need no memory.
    vae_config.setdefault("latents_mean", [0.0] * channels)
    vae_config.setdefault("latents_std", [1.0] * channels)
    with made_on(device, dtype):
        transformer = GlmImageTransformer2DModel.from_config(configs.transformer)
        vae = AutoencoderKL.from_config(vae_config)
        encoder = T5EncoderModel(T5Config.from_dict(configs.text_encoder))
    return {
        "transformer": _frozen(transformer),
        "vae": _frozen(vae),
        "text_encoder": _frozen(encoder),
        "tokenizer": build_glyph_tokenizer(),
        "scheduler": build_scheduler(),
    }


def pipeline_of(*parts: dict[str, Any]) -> GlmImagePipeline:
    """Build the published pipeline from some parts; it works without the others."""
    given = {name: part for some in parts for name, part in some.items()}
    pipeline = GlmImagePipeline(**{name: given.get(name) for name in PARTS})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _processor_of(settings: GlmImageConfig) -> GlmImageProcessor:
    codebook = settings.vq_config.num_embeddings
    return build_processor(
        PolicySizes(codebook=codebook, reserved=settings.text_config.vision_vocab_size - codebook)
    )


@contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Create what is built inside on a device, in a dtype, with the same weights each time."""
    usual = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(usual)


def _frozen(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)
