"""Loads a GLM-Image pipeline as published: a folder in the diffusers layout, or a hub id."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import GlmImagePipeline

from glm_grpo.errors import ModelError
from glm_grpo.glm_image.quantization import (
    AS_PUBLISHED,
    Quantization,
    hold_in_8_bits,
    load_in_4_bits,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_pipeline(
    path: str, *, dtype: torch.dtype, quantization: Quantization = AS_PUBLISHED
) -> GlmImagePipeline:
    """All parts of the pipeline, on the CPU, in evaluation mode.

    Args:
        path: A folder that `GlmImagePipeline.save_pretrained` wrote, or a hub id.
        dtype: Of all weights but those of fewer bits.
        quantization: Which weights are held in fewer bits.

    Raises:
        ModelError: Nothing can be loaded from there; says what was tried and the remedy.
    """
    folder = Path(path)
    if folder.is_dir():
        _check_folder(folder)
    elif path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelError(
            f"model.path is {path!r}: there is no such folder, and a hub id has the form "
            "owner/name; give an existing folder, a hub id such as zai-org/GLM-Image, or 'tiny'"
        )
    try:
        pipeline = _load(path, dtype, quantization)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model.path is {path!r}: the pipeline could not be loaded ({reason}); a folder must "
            "hold all parts of a GlmImagePipeline; a hub id needs a network and, once, about "
            "34 GB of download (`hf download zai-org/GLM-Image --local-dir FOLDER`, then "
            "model.path=FOLDER)"
        ) from error
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval().requires_grad_(False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _load(path: str, dtype: torch.dtype, quantization: Quantization) -> GlmImagePipeline:
    if quantization.language is None:
        pipeline = GlmImagePipeline.from_pretrained(path, dtype=dtype, use_safetensors=True)
    else:
        model = load_in_4_bits(path, dtype=dtype)
        pipeline = GlmImagePipeline.from_pretrained(
            path, dtype=dtype, use_safetensors=True, vision_language_encoder=None
        )
        pipeline.register_modules(vision_language_encoder=model)
    if quantization.decoder is not None:
        hold_in_8_bits(pipeline.transformer)
    return pipeline


def _check_folder(folder: Path) -> None:
    index = folder / "model_index.json"
    if not index.is_file():
        raise ModelError(
            f"model.path is {str(folder)!r}: it has no model_index.json; give the top folder of a "
            "pipeline in the diffusers layout"
        )
    try:
        name = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ModelError(f"{index}: not a JSON object ({error}); download it again") from error
    if name != GlmImagePipeline.__name__:
        raise ModelError(
            f"model.path is {str(folder)!r}: its model_index.json names the class {name!r}; this "
            f"trainer loads {GlmImagePipeline.__name__}"
        )
