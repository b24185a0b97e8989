"""Load Janus-Pro as transformers publishes it: a folder with one config, or a hub id."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import JanusConfig, JanusForConditionalGeneration, JanusProcessor

from glm_grpo.errors import ModelError
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.four_bits import move_to_cpu, options_for_4_bits
from glm_grpo.models.janus_pro.prompt_inputs import tokenize_prompts
from glm_grpo.models.model_files import (
    FETCH_AGAIN,
    check_files,
    check_ids,
    damage_named,
    find_folder,
    read_object,
    refuse_missing,
)

_KEPT_MODULES = (
    "lm_head",
    "model.vision_model",
    "model.aligner",
    "model.vqmodel",
    "model.generation_embeddings",
    "model.generation_aligner",
    "model.generation_head",
)
"""Modules to keep unquantised: all but the language model's layers."""

_ROLES = frozenset({"<|User|>", "<|Assistant|>"})
"""Texts of the chat template that begin a turn, whatever the tokenizer says of them."""

_CPU = torch.device("cpu")
_SMALL_FILES = ["*.json", "*.jinja"]
_ALL_FILES = [*_SMALL_FILES, "*.safetensors"]


@dataclass(frozen=True)
class JanusPro:
    """A loaded model: its parts, on the CPU in evaluation mode."""

    model: JanusForConditionalGeneration
    processor: JanusProcessor


def check_model(path: str) -> ReservedTokens:
    """Check what can be read in a second: config, tokenizer, and whether files are complete.

    For a hub id, config and tokenizer are downloaded for the check.

    Returns:
        Texts that no prompt may contain.
    """
    folder = find_folder(path, partial(_download, path, _SMALL_FILES))
    check_files(folder)
    config = read_config(folder)
    processor = read_processor(folder)
    tokenizer = processor.tokenizer
    check_ids(folder, tokenizer, config.text_config.vocab_size)
    _check_template(folder, processor)
    named = {str(token) for token in tokenizer.all_special_tokens}
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    images = {processor.image_token, processor.image_start_token, processor.image_end_token}
    return ReservedTokens(in_prompts=frozenset(named | added | images | _ROLES))


def load_pipeline(
    path: str,
    *,
    dtype: torch.dtype,
    quantization: str | None = None,
    decoder_quantization: str | None = None,
    quantize_on: torch.device = _CPU,
) -> JanusPro:
    """Load model and processor on the CPU in evaluation mode, every parameter from its files.

    Vision tower and text head are loaded, because an export contains them, but are never placed.

    Args:
        path: Folder that `JanusForConditionalGeneration.save_pretrained` wrote, or a hub id.
        dtype: Dtype of all weights that are not quantised.
        quantization: `nf4` stores the matrices of the language model's layers in 4 bits.
        decoder_quantization: None: the decoder has no such form.
        quantize_on: Device that quantises the language model to 4 bits.
    """
    is_quantizing = quantization is not None
    four_bits = options_for_4_bits(dtype, quantize_on, kept=_KEPT_MODULES) if is_quantizing else {}
    folder = find_folder(path, partial(_download, path, _ALL_FILES))
    check_files(folder)
    read_config(folder)
    with damage_named(folder):
        model, report = JanusForConditionalGeneration.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            **four_bits,
        )
    refuse_missing(folder, report["missing_keys"])
    if is_quantizing:
        move_to_cpu(model)
    model.eval().requires_grad_(False)
    return JanusPro(model, read_processor(folder))


def read_config(folder: Path) -> Any:
    """Read a folder's config, and check that its parts fit together."""
    path = folder / "config.json"
    values = read_object(path)
    if values.get("model_type") != "janus":
        raise ModelError(
            f"{path}: model_type is {values.get('model_type')!r}; this family loads 'janus'"
        )
    with damage_named(path):
        config = JanusConfig.from_dict(values)
        side, pixels = config.vq_config.num_patches, image_side(config)
        tokens, width = config.vision_config.num_image_tokens, config.text_config.hidden_size
        text = config.text_config
        limits = (
            (
                text.model_type == "llama",
                f"the language model is a {text.model_type!r}, not a llama",
            ),
            (
                text.attention_dropout == 0,
                "attention_dropout is not 0, and replay cannot repeat what sampling did with it",
            ),
        )
        rules = (
            (tokens == side**2, f"{tokens} tokens an image, but a grid of {side} x {side}"),
            (
                config.vision_config.image_size == pixels,
                f"images of {config.vision_config.image_size} pixels, but {pixels} are decoded",
            ),
            (
                config.vq_config.projection_dim == config.vq_config.image_token_embed_dim == width,
                f"width {width} of the language model, but {config.vq_config.projection_dim} and "
                f"{config.vq_config.image_token_embed_dim} of generated tokens",
            ),
        )
    for holds, found in limits:
        if not holds:
            raise ModelError(f"{path}: {found}; use a model like those of deepseek-community")
    for holds, found in rules:
        if not holds:
            raise ModelError(f"{path}: its parts do not match ({found}); {FETCH_AGAIN}")
    return config


def image_side(config: Any) -> int:
    """Height and width in pixels of every image."""
    levels = len(config.vq_config.channel_multiplier)
    side: int = config.vq_config.num_patches * 2 ** (levels - 1)
    return side


def read_processor(folder: Path) -> JanusProcessor:
    """Load tokenizer and chat template."""
    with damage_named(folder):
        return JanusProcessor.from_pretrained(folder, local_files_only=True)


def _check_template(folder: Path, processor: JanusProcessor) -> None:
    if not isinstance(processor.chat_template, str) or not processor.chat_template:
        raise ModelError(
            f"{folder}: contains no chat template (chat_template.jinja); {FETCH_AGAIN}"
        )
    with damage_named(folder):
        ids = tokenize_prompts(processor, ("a red cat", "two boats"))["input_ids"]
        if ids[0].equal(ids[1]):
            raise ValueError("the chat template drops the prompt")


def _download(path: str, patterns: list[str]) -> str:
    return snapshot_download(path, allow_patterns=patterns)
