"""GLM-Image on the meta device, from its configs alone: what a plan measures."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, GlmImageTransformer2DModel
from torch import nn
from transformers import (
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

from glm_grpo.errors import ModelError
from glm_grpo.glm_image.meta_memory import META
from glm_grpo.glm_image.model_folder import damage_named, read_config
from glm_grpo.glm_image.quantization import hold_in_8_bits

PUBLISHED_ID = "zai-org/GLM-Image"
"""Hub id whose sizes are known without its files."""

_PUBLISHED: dict[str, dict[str, Any]] = {
    # The defaults of the class, but for the rotation, which it leaves open: half of each head.
    "vision_language_encoder": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 12, 12],
                "partial_rotary_factor": 0.5,
            }
        }
    },
    "transformer": {"num_layers": 30, "num_attention_heads": 32, "attention_head_dim": 128},
    # Of CogView4, whose latents have the same form: GLM-Image's own config is not at hand.
    "vae": {
        "block_out_channels": (128, 512, 1024, 1024),
        "layers_per_block": 3,
        "latent_channels": 16,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "mid_block_add_attention": False,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
    # ByT5 small, whose width is the decoder's text_embed_dim.
    "text_encoder": {
        "vocab_size": 384,
        "d_model": 1472,
        "d_kv": 64,
        "d_ff": 3584,
        "num_layers": 12,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
}


@dataclass(frozen=True)
class PartConfigs:
    """The config.json of each part, as plain values.

    Attributes:
        language: Of the language model with its vision tower.
        transformer: Of the diffusion transformer.
        vae: Of the decoder to pixels.
        text_encoder: Of the glyph encoder.
    """

    language: dict[str, Any]
    transformer: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]

    @property
    def num_layers(self) -> int:
        """Decoder layers of the language model."""
        return GlmImageConfig.from_dict(self.language).text_config.num_hidden_layers


def read_part_configs(path: str) -> PartConfigs:
    """The configs of a folder in the diffusers layout, or of the published model.

    Args:
        path: A folder, or the published model's hub id.

    Raises:
        ModelError: It is neither, or a part's config.json is missing or damaged, or no model can be
            built from it.
    """
    folder = Path(path)
    if path == PUBLISHED_ID and not folder.is_dir():
        return _part_configs(_PUBLISHED)
    if not folder.is_dir():
        raise ModelError(
            f"model.path is {path!r}: there is no such folder, and sizes are known of "
            f"{PUBLISHED_ID} alone without one; give a folder with the config.json of every part "
            f"(`hf download {path} --include '*/config.json' --local-dir FOLDER`), which needs no "
            "weights"
        )
    configs = _part_configs({part: read_config(folder, part) for part in _PUBLISHED})
    for part in _PUBLISHED:
        with damage_named(folder / part / "config.json"):
            build_part(configs, part)
    return configs


def _part_configs(parts: dict[str, dict[str, Any]]) -> PartConfigs:
    return PartConfigs(
        language=parts["vision_language_encoder"],
        transformer=parts["transformer"],
        vae=parts["vae"],
        text_encoder=parts["text_encoder"],
    )


def build_part(configs: PartConfigs, part: str) -> Any:
    """A model without values, in fp32; `part` is a name of `model_index.json`."""
    with META:
        match part:
            case "vision_language_encoder":
                return GlmImageForConditionalGeneration(GlmImageConfig.from_dict(configs.language))
            case "transformer":
                return GlmImageTransformer2DModel.from_config(configs.transformer)
            case "vae":
                return AutoencoderKL.from_config(configs.vae)
            case _:
                return T5EncoderModel(T5Config.from_dict(configs.text_encoder))


def build_language_model(
    config: dict[str, Any], dtype: torch.dtype, *, layers: int | None = None
) -> GlmImageForConditionalGeneration:
    """Language model, vision tower and head.

    Args:
        config: As in its config.json.
        dtype: Of all weights.
        layers: Decoder layers; None: as many as the config says.
    """
    settings = GlmImageConfig.from_dict(config)
    if layers is not None:
        settings.text_config.num_hidden_layers = layers
    with META:
        return GlmImageForConditionalGeneration(settings).to(dtype).eval()


def build_decoder(
    configs: PartConfigs, dtype: torch.dtype, *, is_in_8_bits: bool = False
) -> tuple[Any, Any, nn.Module]:
    """Transformer, VAE and glyph encoder, in this order.

    Args:
        configs: Of the model.
        dtype: Of weights and activations.
        is_in_8_bits: The transformer's weights are held in 8 bits.
    """
    logger = logging.getLogger("diffusers.models.modeling_utils")
    level = logger.level
    # It tells that nothing is to be kept in fp32.
    logger.setLevel(logging.ERROR)
    transformer = build_part(configs, "transformer").to(dtype)
    vae = build_part(configs, "vae").to(dtype)
    encoder = build_part(configs, "text_encoder").to(dtype)
    if is_in_8_bits:
        hold_in_8_bits(transformer)
    logger.setLevel(level)
    return transformer.eval(), vae.eval(), encoder.eval()
