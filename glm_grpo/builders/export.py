"""Export trained weights in formats that other programs load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from glm_grpo.builders.family import family_of
from glm_grpo.builders.models import model_path
from glm_grpo.config import TINY, Config
from glm_grpo.models.base import DTYPES
from glm_grpo.models.export import README, StockSettings, find_license
from glm_grpo.run.folder import storage_errors
from glm_grpo.tiny.prompts import EXAMPLE_CAPTION, EXAMPLE_INSTRUCTION, known_form

_METHODS = {"grpo": ("grpo", "reinforcement-learning"), "sft": ("sft",)}
"""Tags of a page by `train.method`."""

_TINY_LICENSE = "apache-2.0"
"""Licence of the package."""


def export_model(
    config: Config,
    tensors: Mapping[str, Tensor],
    directory: Path,
    *,
    kind: Literal["adapter", "pipeline"],
    prompt: str | None,
    results: str,
    training: str,
) -> Path:
    """Write trained weights in a format that other programs load.

    Args:
        directory: Output folder, new or empty.
        kind: `adapter`: a folder that peft loads; `pipeline`: one that diffusers loads.
        prompt: Prompt for the examples; None: one that suits the model.
        results: Sections of the card, in Markdown, on what training changed.
        training: Likewise on how the weights were trained.

    Returns:
        Path of the page, which shows how to generate an image.

    Raises:
        ModelError: The original model of the run cannot be loaded.
        CheckpointError: The tensors do not match it.
        StorageError: The folder cannot be written.
    """
    base = model_path(config.model.path)
    family = family_of(config.model.path)
    pipeline = family.load_pipeline(base, dtype=DTYPES[config.model.dtype])
    policy = family.build_policy(config, pipeline, needs_reference=False)
    policy.load_state_tensors(tensors)
    settings = StockSettings(
        base=base,
        is_embedded=config.model.path == TINY,
        dtype=config.model.dtype,
        rollout=config.rollout,
        decode=config.decode,
        license=_TINY_LICENSE if config.model.path == TINY else find_license(base),
        results=results,
        training=training,
        prompt=prompt or _example_prompt(config),
        num_sources=config.data.sources,
        notes=_notes(config),
        method=_METHODS[config.train.method],
    )
    with storage_errors("write", directory):
        family.export(policy, pipeline, settings, directory, kind=kind)
        # safetensors writes files that only their owner can read.
        for path in directory.rglob("*.safetensors"):
            shutil.copymode(directory / README, path)
    return directory / README


def _notes(config: Config) -> tuple[str, ...]:
    notes = []
    if config.model.path == TINY:
        form = known_form(is_edit=config.data.sources > 0)
        notes.append(f"The model knows only prompts of the form `{form}`.")
    if config.model.quantization is not None:
        notes.append(
            "The run loaded the language model in 4 bits. The calls load it in "
            f"{config.model.dtype}, so images differ from those of the run."
        )
    if config.decode.quantization is not None:
        notes.append(
            "The run decoded with weights in 8 bits. The calls decode with "
            f"{config.model.dtype}, so images differ slightly from those of the run."
        )
    return tuple(notes)


def _example_prompt(config: Config) -> str:
    """Prompt for a page: the embedded model only knows prompts of its own world."""
    is_edit = config.data.sources > 0
    if config.model.path == TINY:
        return EXAMPLE_INSTRUCTION if is_edit else EXAMPLE_CAPTION
    if family_of(config.model.path).TEXT_RULE is None:
        return "three red cups on a wooden table"
    return 'write "OPEN" instead' if is_edit else 'a red sign that says "OPEN"'
