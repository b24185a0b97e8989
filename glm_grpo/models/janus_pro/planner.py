"""Sizes of Janus-Pro from its config, for plans of memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import JanusConfig, JanusForConditionalGeneration

from glm_grpo.config import Config
from glm_grpo.config.sections import RolloutSection
from glm_grpo.errors import ConfigError, GlmGrpoError
from glm_grpo.models.base import DTYPES
from glm_grpo.models.janus_pro.files import PUBLISHED
from glm_grpo.models.janus_pro.loading import image_side, read_config, read_processor
from glm_grpo.models.janus_pro.network import guidance_of
from glm_grpo.models.janus_pro.prompt_inputs import longest_prompt_tokens
from glm_grpo.models.model_files import is_hub_id
from glm_grpo.models.module_sizes import count_flops, matrix_names, part_bytes
from glm_grpo.models.planning import LanguageShape, PartBytes

_STORED_STATES, _BACKWARD_STATES = 5, 4
"""See `LanguageShape`; measured on stock layers (LOG.md, "Janus-Pro")."""
_DECODED_STATES, _ENCODED_STATES = 3.1, 4.5
"""Tensors of the first level's channels, at the size of the image, at the peak of the VQ's decoder
and encoder."""
_PIXEL_COPIES, _FLOAT32 = 3, 4
"""Images in fp32 while their levels are computed, and bytes of a number."""


def knows_sizes(path: str) -> bool:
    """Whether it is a published model, a folder of one, or a hub id whose config is cached."""
    return path in PUBLISHED or find_config_folder(path) is not None


def find_config_folder(path: str) -> Path | None:
    """Folder with the config: the model's, or that of a hub id's files in the cache."""
    if Path(path).is_dir():
        return Path(path) if (Path(path) / "config.json").is_file() else None
    cached = try_to_load_from_cache(path, "config.json") if is_hub_id(path) else None
    return Path(cached).parent if isinstance(cached, str) else None


def read_sizes(path: str) -> Any:
    """Config of a folder, or of a published model."""
    folder = Path(path) if Path(path).is_dir() else find_config_folder(path)
    if folder is not None:
        return read_config(folder)
    if path not in PUBLISHED:
        raise ConfigError(
            f"model.path is {path!r}: there is no such folder, and without one only the sizes of "
            f"{' and '.join(PUBLISHED)} are known; give a folder with its config.json "
            f"(`hf download {path} config.json --local-dir FOLDER`), which needs no weights"
        )
    width, mlp_width, layers, heads = PUBLISHED[path]
    return JanusConfig.from_dict(
        {
            "text_config": {
                "model_type": "llama",
                "hidden_size": width,
                "intermediate_size": mlp_width,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "vocab_size": 102_400,
            },
            "vision_config": {"projection_dim": width, "num_image_tokens": 576},
            "vq_config": {"projection_dim": width, "image_token_embed_dim": width},
        }
    )


class JanusProPlanner:
    """Janus-Pro as a `Planner`.

    Args:
        folder: Folder of the tokenizer; None if it is not available.
    """

    usual_prompt_tokens = 64
    """See `Planner`; a caption of two lines with its template."""

    smaller_sides: tuple[int, ...] = ()
    """See `Planner`; all images have one size."""

    def __init__(self, config: Any, folder: Path | None = None) -> None:
        self._config = config
        self._folder = folder

    @cached_property
    def _model(self) -> Any:
        """The whole model with one layer, on torch's meta device, in fp32."""
        values = self._config.to_dict()
        values["text_config"]["num_hidden_layers"] = 1
        with torch.device("meta"):
            return JanusForConditionalGeneration(JanusConfig.from_dict(values)).model

    @cached_property
    def language(self) -> LanguageShape:
        """See `Planner`; `outside` contains the frozen parts of generated tokens."""
        text, model = self._config.text_config, self._model
        first = model.language_model.layers[0]
        layer = [*first.parameters()]
        embedding, drawn = model.language_model.embed_tokens.weight, model.generation_embeddings
        others = [model.language_model.norm, model.generation_aligner, model.generation_head]
        outside = [weight.numel() for module in others for weight in module.parameters()]
        return LanguageShape(
            layers=text.num_hidden_layers,
            width=text.hidden_size,
            mlp_width=text.intermediate_size,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_size=model.language_model.layers[0].self_attn.head_dim,
            matrices=tuple(tuple(weight.shape[::-1]) for weight in layer if weight.dim() > 1),
            matrix_names=matrix_names(first),
            layer_vectors=tuple(weight.numel() for weight in layer if weight.dim() == 1),
            outside=(embedding.numel(), drawn.weight.numel(), *outside),
            unread=embedding.numel() + drawn.weight.numel(),
            drawn=self._config.vq_config.num_embeddings,
            stored_states=_STORED_STATES,
            backward_states=_BACKWARD_STATES,
            is_prompt_shared=False,
        )

    def rows_per_image(self, rollout: RolloutSection) -> int:
        """See `Planner`."""
        return 2 if guidance_of(rollout) > 1 else 1

    def unplaced(self, dtype: torch.dtype) -> int:
        """See `Planner`: vision tower, its aligner, and the text head."""
        model, text = self._model, self._config.text_config
        head = text.vocab_size * text.hidden_size * dtype.itemsize
        # A parameter has four bytes on the meta device.
        vision = part_bytes([model.vision_model, model.aligner]).size
        return head + vision * dtype.itemsize // torch.float32.itemsize

    def vision(self, dtype: torch.dtype) -> PartBytes:
        """See `Planner`; the encoder of the VQ."""
        vqmodel = self._vqmodel(dtype)
        return part_bytes([vqmodel.encoder, vqmodel.quant_conv])

    def decoder(self, dtype: torch.dtype, quantization: str | None) -> PartBytes:
        """See `Planner`; never quantised."""
        vqmodel = self._vqmodel(dtype)
        return part_bytes([vqmodel.quantize, vqmodel.post_quant_conv, vqmodel.decoder])

    def decode_bytes(self, config: Config, *, group_size: int, prompt_tokens: int) -> int:
        """See `Planner`."""
        at_once = min(group_size, config.decode.batch_size or group_size)
        pixels = 3 * image_side(self._config) ** 2
        return at_once * (self._states(_DECODED_STATES, config) + _PIXEL_COPIES * pixels * _FLOAT32)

    def sources_bytes(self, config: Config) -> int:
        """See `Planner`."""
        return self._states(_ENCODED_STATES, config)

    def sequence_tokens(self, config: Config, prompt_tokens: int) -> tuple[int, int]:
        """See `Planner`."""
        return prompt_tokens, self._config.vq_config.num_patches**2

    def longest_prompt_tokens(
        self, captions: Sequence[str], *, height: int, width: int
    ) -> int | None:
        """See `Planner`."""
        if self._folder is None:
            return None
        try:
            return longest_prompt_tokens(read_processor(self._folder), captions)
        except (GlmGrpoError, OSError, ValueError):
            # Loading the model reports what is wrong with its files.
            return None

    def decode_flops(self, config: Config) -> int:
        """See `Planner`."""
        vqmodel = self._model.vqmodel
        tokens = torch.zeros(1, self._config.vq_config.num_patches**2, device="meta")
        return count_flops(lambda: vqmodel.decode(tokens.long()))

    def _vqmodel(self, dtype: torch.dtype) -> Any:
        with torch.device("meta"):
            return nn.Module.to(type(self._model.vqmodel)(self._config.vq_config), dtype)

    def _states(self, number: float, config: Config) -> int:
        """Bytes of tensors of the VQ's first level, for one image."""
        entries = self._config.vq_config.base_channels * image_side(self._config) ** 2
        return int(number * entries * DTYPES[config.model.dtype].itemsize)
