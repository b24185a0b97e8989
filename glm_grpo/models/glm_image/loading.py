"""Load a GLM-Image pipeline as published: a folder in the diffusers layout, or a hub id."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from huggingface_hub import snapshot_download
from transformers import GlmImageForConditionalGeneration, T5EncoderModel

from glm_grpo.errors import ConfigError, ModelError
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.four_bits import move_to_cpu, options_for_4_bits
from glm_grpo.models.glm_image.model_folder import check_parts, check_tokenizers
from glm_grpo.models.glm_image.planner import build_part, read_part_configs
from glm_grpo.models.glm_image.prompt_inputs import source_tokens
from glm_grpo.models.glm_image.quantization import KEPT_MODULES, hold_in_8_bits
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.models.model_files import damage_named, find_folder, read_object, refuse_missing

_PARTS: dict[str, Any] = {
    "text_encoder": T5EncoderModel,
    "vision_language_encoder": GlmImageForConditionalGeneration,
    "vae": AutoencoderKL,
    "transformer": GlmImageTransformer2DModel,
}
"""Parts with weights, by name in `model_index.json`."""

_LANGUAGE = "vision_language_encoder"

_CPU = torch.device("cpu")

_SMALL_FILES = ["*.json", "*.jinja"]
"""Configs and tokenizers, which can be checked before gigabytes are downloaded."""

_LARGEST_ASPECT = 4
"""Largest aspect ratio that the processor reads; source: transformers' `smart_resize`."""


def check_model(path: str) -> ReservedTokens:
    """Check what can be read in a second: configs, tokenizers, and whether files are complete.

    For a hub id, configs and tokenizers are downloaded for the check. Missing parameters are only
    found when the weights are loaded.

    Returns:
        Texts that no prompt may contain.
    """
    folder = find_folder(path, partial(_download_small_files, path))
    return _check_folder(folder)


def check_source_size(path: str, *, height: int, width: int) -> None:
    """Refuse sizes at which the model cannot read source images.

    The processor resizes an image whose sides are outside its bounds, and the image's tokens and
    latents would then have different sizes.

    Args:
        height: Height of the rollout's images, to which sources are fitted, pixels.
    """
    folder = find_folder(path, partial(_download_small_files, path))
    try:
        found = str(source_tokens(str(folder), height=height, width=width))
    except ValueError as error:
        found = f"none ({error})"
    wanted = token_layout(height, width, has_preview=False).num_target
    if found != str(wanted):
        raise ConfigError(
            f"data.sources needs an image size that the model's processor does not change; for "
            f"rollout.height={height}, rollout.width={width} it makes {found} tokens instead of "
            f"{wanted}. Use sides within its bounds (preprocessor settings in {folder}/processor), "
            "for the published model 512 to 2048 pixels, the longer at most 4 times the shorter"
        )


def check_target_size(*, height: int, width: int) -> None:
    """Refuse sizes at which the model cannot read target images.

    Args:
        height: Height of the rollout's images, pixels.
    """
    if max(height, width) > _LARGEST_ASPECT * min(height, width):
        raise ConfigError(
            f"rollout.height={height}, rollout.width={width}: the run learns from target images "
            "(train.method, sft.weight), and the model's processor reads no image whose longer "
            f"side is more than {_LARGEST_ASPECT} times the shorter. Use another size, or do not "
            "learn from targets"
        )


def load_pipeline(
    path: str,
    *,
    dtype: torch.dtype,
    quantization: str | None = None,
    decoder_quantization: str | None = None,
    quantize_on: torch.device = _CPU,
) -> GlmImagePipeline:
    """Load all parts of the pipeline on the CPU in evaluation mode, every parameter from its files.

    Args:
        path: Folder that `GlmImagePipeline.save_pretrained` wrote, or a hub id.
        dtype: Dtype of all weights that are not quantised; of the decoder, see `decoder_dtype`.
        quantization: `nf4` stores the matrices of the language model's layers in 4 bits, with
            blocks of 64 and 8-bit scales. Source: QLoRA, Dettmers et al. 2023 (arXiv 2305.14314),
            section 3.
        decoder_quantization: `float8` stores the weights of the diffusion transformer in 8 bits,
            and casts them to its dtype layer by layer when they are used.
        quantize_on: Device that quantises the language model to 4 bits; an accelerator takes
            seconds, the CPU minutes.
    """
    is_quantizing = quantization is not None
    four_bits = options_for_4_bits(dtype, quantize_on, kept=KEPT_MODULES) if is_quantizing else {}
    folder = find_folder(path, partial(GlmImagePipeline.download, path, use_safetensors=True))
    _check_folder(folder)
    models = {
        part: _load_part(folder, part, decoder_dtype(dtype), {})
        for part in _PARTS
        if part != _LANGUAGE
    }
    models[_LANGUAGE] = _load_part(folder, _LANGUAGE, dtype, four_bits)
    if is_quantizing:
        move_to_cpu(models[_LANGUAGE])
    with damage_named(folder):
        others = GlmImagePipeline.from_pretrained(folder, **dict.fromkeys(models)).components
        pipeline = GlmImagePipeline(**{**others, **models})
    if decoder_quantization is not None:
        hold_in_8_bits(pipeline.transformer)
    for model in models.values():
        model.eval().requires_grad_(False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def decoder_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the decoder's parts beside a language model in `dtype`.

    Numbers in the diffusion transformer exceed the range of float16. Source: README of CogView4,
    from which it comes ("Only supports BF16, FP32").
    """
    return torch.bfloat16 if dtype == torch.float16 else dtype


def _load_part(folder: Path, part: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    with damage_named(folder / part):
        model, report = _PARTS[part].from_pretrained(
            folder,
            subfolder=part,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            **options,
        )
    refuse_missing(folder / part, report["missing_keys"])
    return model


def _download_small_files(path: str) -> str:
    return snapshot_download(path, allow_patterns=_SMALL_FILES, max_workers=1)


def _check_folder(folder: Path) -> ReservedTokens:
    check_index(folder)
    check_parts(folder)
    configs = read_part_configs(str(folder))
    parts = {part: build_part(configs, part).config for part in _PARTS}
    _check_sizes(folder, **parts)
    return check_tokenizers(
        folder,
        vocabulary=parts[_LANGUAGE].text_config.vocab_size,
        glyphs=parts["text_encoder"].vocab_size,
    )


def check_index(folder: Path) -> None:
    """Check that a folder's pipeline has the expected parts."""
    path = folder / "model_index.json"
    if not path.is_file():
        raise ConfigError(
            f"model.path is {str(folder)!r}: it has no model_index.json; give the top folder of a "
            "GLM-Image pipeline in the diffusers layout, or of a Janus-Pro that transformers loads"
        )
    index = read_object(path)
    wanted = {part: model.__name__ for part, model in _PARTS.items()}
    for part, name in {**wanted, "processor": "GlmImageProcessor"}.items():
        if not isinstance(index.get(part), list) or index[part][1:] != [name]:
            raise ModelError(
                f"{path}: {part} is {index.get(part)!r}; this trainer loads a {name} there"
            )


def _check_sizes(
    folder: Path, *, vision_language_encoder: Any, transformer: Any, vae: Any, text_encoder: Any
) -> None:
    """Check that each part's output has the size that the next part reads."""
    language = vision_language_encoder
    codebook = language.vq_config.num_embeddings
    entries, outputs = language.text_config.vocab_size, language.text_config.vision_vocab_size
    tokens = (language.image_start_token_id, language.image_end_token_id, language.image_token_id)
    rules = (
        (codebook <= outputs <= entries, f"codebook {codebook}, head {outputs}, text {entries}"),
        (
            all(0 <= token < entries for token in tokens),
            f"image tokens {tokens} in a vocabulary of {entries}",
        ),
        (
            codebook <= transformer.prior_vq_quantizer_codebook_size,
            f"codebook {codebook}, but {transformer.prior_vq_quantizer_codebook_size} in the "
            "transformer",
        ),
        (
            text_encoder.d_model == transformer.text_embed_dim,
            f"width {text_encoder.d_model} of the glyph encoder, but {transformer.text_embed_dim} "
            "in the transformer",
        ),
        (
            vae.latent_channels == transformer.in_channels == transformer.out_channels,
            f"{vae.latent_channels} channels of the VAE, but {transformer.in_channels} and "
            f"{transformer.out_channels} in the transformer",
        ),
    )
    for holds, found in rules:
        if not holds:
            raise ModelError(
                f"{folder}: the config.json files of its parts do not match ({found}); fetch all "
                "files of one revision again (`hf download`)"
            )
