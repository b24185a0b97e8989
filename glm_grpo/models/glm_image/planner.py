"""Sizes of GLM-Image from the configs of its parts, for plans of memory and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, GlmImageTransformer2DModel
from torch import Tensor, nn
from transformers import (
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

from glm_grpo.config import Config
from glm_grpo.config.sections import RolloutSection
from glm_grpo.errors import ConfigError
from glm_grpo.models.base import DTYPES
from glm_grpo.models.glm_image.decoder import decoded_at_once
from glm_grpo.models.glm_image.files import PUBLISHED_ID
from glm_grpo.models.glm_image.model_folder import read_config
from glm_grpo.models.glm_image.prompt_inputs import longest_prompt_tokens
from glm_grpo.models.glm_image.quantization import hold_in_8_bits
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.models.model_files import damage_named
from glm_grpo.models.module_sizes import count_flops, matrix_names, part_bytes
from glm_grpo.models.planning import LanguageShape, PartBytes

_PUBLISHED: dict[str, dict[str, Any]] = {
    # Values of the published config.json files that differ from the defaults of the class.
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
    "vae": {
        "sample_size": 1024,
        "block_out_channels": (128, 512, 1024, 1024),
        "layers_per_block": 3,
        "latent_channels": 16,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "mid_block_add_attention": False,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
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

_STORED_STATES, _BACKWARD_STATES = 9, 11
"""See `LanguageShape`; four norms a layer."""
_DRAWN_STATES = 14.5
"""Hidden states per latent patch and glyph during a pass of the diffusion transformer."""
_VAE_STATES = 3
"""Tensors of the second level's channels, at the size of the image, while latents become pixels."""


@dataclass(frozen=True)
class PartConfigs:
    """The config.json of each part, as plain values.

    Attributes:
        language: Config of the language model with its vision tower.
    """

    language: dict[str, Any]
    transformer: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]


def read_part_configs(path: str) -> PartConfigs:
    """Read the configs of a folder in the diffusers layout, or of the published model.

    Args:
        path: A folder, or the published model's hub id.
    """
    folder = Path(path)
    if path == PUBLISHED_ID and not folder.is_dir():
        return _part_configs(_PUBLISHED)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path is {path!r}: there is no such folder, and without one only the "
            f"sizes of {PUBLISHED_ID} are known; give a folder with the config.json of every part "
            f"(`hf download {path} --include '*/config.json' --local-dir FOLDER`), which needs no "
            "weights"
        )
    configs = _part_configs({part: read_config(folder, part) for part in _PUBLISHED})
    for part in _PUBLISHED:
        with damage_named(folder / part / "config.json"):
            build_part(configs, part)
    return configs


def trained_side(path: str) -> int | None:
    """Side in pixels of the model's training images: `sample_size` of its VAE.

    Args:
        path: A folder in the diffusers layout, or a hub id.

    Returns:
        None if no config contains it, as for a hub id other than the published one.
    """
    folder = Path(path)
    if (folder / "vae" / "config.json").is_file():
        return read_config(folder, "vae").get("sample_size")
    return _PUBLISHED["vae"]["sample_size"] if path == PUBLISHED_ID else None


def _part_configs(parts: dict[str, dict[str, Any]]) -> PartConfigs:
    return PartConfigs(
        language=parts["vision_language_encoder"],
        transformer=parts["transformer"],
        vae=parts["vae"],
        text_encoder=parts["text_encoder"],
    )


def build_part(configs: PartConfigs, part: str) -> Any:
    """Build a part on torch's meta device, in fp32; `part` is a name in `model_index.json`."""
    with torch.device("meta"):
        match part:
            case "vision_language_encoder":
                return GlmImageForConditionalGeneration(GlmImageConfig.from_dict(configs.language))
            case "transformer":
                return GlmImageTransformer2DModel.from_config(configs.transformer)
            case "vae":
                return AutoencoderKL.from_config(configs.vae)
            case _:
                return T5EncoderModel(T5Config.from_dict(configs.text_encoder))


class GlmImagePlanner:
    """GLM-Image as a `Planner`.

    Args:
        folder: Folder of the model's tokenizers; None if they are not available.
    """

    def __init__(self, configs: PartConfigs, folder: Path | None = None) -> None:
        self._configs = configs
        self._folder = folder
        self.vision = cache(self._vision)
        self.decoder = cache(self._decoder)
        self.decoder_flops = cache(self._decoder_flops)

    usual_prompt_tokens = 256
    """See `Planner`."""

    @property
    def smaller_sides(self) -> tuple[int, ...]:
        """See `Planner`; images smaller than in training only test a setup."""
        return (1024, 768, 512, 256)

    def rows_per_image(self, rollout: RolloutSection) -> int:
        """See `Planner`; there is no guidance between tokens."""
        return 1

    @cached_property
    def language(self) -> LanguageShape:
        """See `Planner`."""
        config = GlmImageConfig.from_dict(self._configs.language)
        text, layers = config.text_config, config.text_config.num_hidden_layers
        model = self._language_model(layers=1)
        layer = model.model.language_model.layers[0]
        embedding = model.model.language_model.embed_tokens.weight.numel()
        drawn = config.vq_config.num_embeddings
        unread = embedding + model.lm_head.weight.numel() - drawn * text.hidden_size
        weights = [*layer.parameters()]
        return LanguageShape(
            layers=layers,
            width=text.hidden_size,
            mlp_width=text.intermediate_size,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_size=layer.self_attn.head_dim,
            matrices=tuple(tuple(w.shape[::-1]) for w in weights if w.dim() > 1),
            matrix_names=matrix_names(layer),
            layer_vectors=tuple(w.numel() for w in weights if w.dim() == 1),
            outside=(embedding, model.lm_head.weight.numel(), text.hidden_size),
            unread=unread,
            drawn=drawn,
            stored_states=_STORED_STATES,
            backward_states=_BACKWARD_STATES,
        )

    def _language_model(self, *, layers: int) -> GlmImageForConditionalGeneration:
        config = GlmImageConfig.from_dict(self._configs.language)
        config.text_config.num_hidden_layers = layers
        with torch.device("meta"):
            return GlmImageForConditionalGeneration(config)

    def unplaced(self, dtype: torch.dtype) -> int:
        """See `Planner`; every part has its use."""
        return 0

    def _vision(self, dtype: torch.dtype) -> PartBytes:
        model = self._language_model(layers=1).to(dtype).model
        return part_bytes([model.visual, model.vqmodel])

    def _decoder(self, dtype: torch.dtype, quantization: str | None) -> PartBytes:
        transformer, vae, encoder = (
            nn.Module.to(build_part(self._configs, part), dtype)
            for part in ("transformer", "vae", "text_encoder")
        )
        if quantization is not None:
            hold_in_8_bits(transformer)
        return part_bytes([transformer, vae, encoder])

    def decode_bytes(self, config: Config, *, group_size: int, prompt_tokens: int) -> int:
        """See `Planner`; guidance runs its passes one after the other."""
        transformer, item = self._configs.transformer, _itemsize(config)
        size, decode = (config.rollout.height, config.rollout.width), config.decode
        heads = transformer.get("num_attention_heads", 64)
        width = heads * transformer.get("attention_head_dim", 40)
        patches = self._patches(*size)
        layers = transformer.get("num_layers", 30)
        # Keys and values of source images, which all images of a group share.
        sources = config.data.sources * patches * 2 * layers * width * item
        at_once = min(group_size, decode.batch_size or group_size)
        tokens = patches + prompt_tokens
        drawing = int(_DRAWN_STATES * width * item) * at_once * tokens + sources
        if decode.quantization is not None:
            # The transformer is cast one layer at a time.
            drawing += max(map(Tensor.numel, self._transformer().parameters())) * item
        rest = group_size % at_once or at_once
        turned = max(decoded_at_once(n, *size, decode.vae_batch_size) for n in (at_once, rest))
        channels = [*self._configs.vae.get("block_out_channels", (64,)), 0]
        pixels = math.prod(size) * item
        # Slices decoded earlier wait, and are concatenated while all of them exist.
        image_bytes = 3 * pixels
        turning = (
            _VAE_STATES * max(channels[:2]) * pixels * turned + (at_once - turned) * image_bytes
        )
        # Finished images wait for the rest of their group.
        waiting = (group_size - at_once) * image_bytes
        return max(drawing, turning + sources, 2 * at_once * image_bytes) + waiting

    def sources_bytes(self, config: Config) -> int:
        """See `Planner`: two copies of the codebook, and each token's distance to every code."""
        vq, item = GlmImageConfig.from_dict(self._configs.language).vq_config, _itemsize(config)
        rollout = config.rollout
        tokens = token_layout(rollout.height, rollout.width, has_preview=False).num_target
        codebook = vq.num_embeddings * vq.embed_dim * item
        return 2 * codebook + tokens * vq.num_embeddings * item

    def sequence_tokens(self, config: Config, prompt_tokens: int) -> tuple[int, int]:
        """See `Planner`; source images stand between start and end tokens."""
        size, sources = (config.rollout.height, config.rollout.width), config.data.sources
        source = token_layout(*size, has_preview=False).num_tokens + 2
        tokens = token_layout(*size, has_preview=sources == 0).num_tokens
        return prompt_tokens + sources * source, tokens

    def longest_prompt_tokens(
        self, captions: Sequence[str], *, height: int, width: int
    ) -> int | None:
        """See `Planner`."""
        if self._folder is None or not (self._folder / "processor").is_dir():
            return None
        try:
            return longest_prompt_tokens(str(self._folder), captions, height=height, width=width)
        except (OSError, ValueError):
            # Loading the model reports what is wrong with its files.
            return None

    def decode_flops(self, config: Config) -> int:
        """See `Planner`; above a guidance scale of 1, every step is two passes."""
        steps, guidance_scale = config.decode.training_steps or 1, config.decode.guidance_scale or 1
        transformer, vae = self.decoder_flops(config.rollout.height, config.rollout.width)
        return steps * (2 if guidance_scale > 1 else 1) * transformer + vae

    def _decoder_flops(self, height: int, width: int) -> tuple[int, int]:
        """Operations for one image of a denoising pass, and of turning latents into pixels.

        Without glyphs, whose number is not in the config.
        """
        transformer, vae = self._transformer(), build_part(self._configs, "vae")
        patches, latent = self._patches(height, width), self._latent(height, width)

        def denoise() -> None:
            transformer(
                hidden_states=_empty(1, transformer.config.in_channels, *latent),
                encoder_hidden_states=_empty(1, 0, transformer.config.text_embed_dim),
                prior_token_id=_empty(1, patches).long(),
                prior_token_drop=_empty(1, patches).bool(),
                timestep=_empty(1),
                target_size=_empty(1, 2),
                crop_coords=_empty(1, 2),
            )

        channels = vae.config.latent_channels
        return count_flops(denoise), count_flops(lambda: vae.decode(_empty(1, channels, *latent)))

    def _transformer(self) -> Any:
        return build_part(self._configs, "transformer")

    def _latent(self, height: int, width: int) -> tuple[int, int]:
        factor = 2 ** (len(self._configs.vae.get("block_out_channels", (64,))) - 1)
        return height // factor, width // factor

    def _patches(self, height: int, width: int) -> int:
        rows, columns = self._latent(height, width)
        return rows * columns // self._configs.transformer.get("patch_size", 2) ** 2


def _itemsize(config: Config) -> int:
    return DTYPES[config.model.dtype].itemsize


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")
