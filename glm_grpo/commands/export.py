"""`glm-grpo export`: write trained weights for other programs."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Literal

from glm_grpo.commands.model_card import Description, describe_training
from glm_grpo.config import Config
from glm_grpo.errors import ConfigError
from glm_grpo.models.base import DTYPES
from glm_grpo.models.export_page import PROGRAM, README, StockSettings, find_license
from glm_grpo.models.family import ModelFamily
from glm_grpo.models.find import FoundModel, find_model
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.run.finding import FoundCheckpoint, find_checkpoint, read_config_at
from glm_grpo.run.folder import refuse_taken, storage_errors, write_atomically
from glm_grpo.tiny.embedded import EMBEDDED

_METHODS = {"grpo": ("grpo", "reinforcement-learning"), "sft": ("sft",)}
"""Tags of a page by `train.method`."""

_TINY_LICENSE = "apache-2.0"
"""Licence of the package."""


def export_run(run: Path, directory: Path, *, kind: Literal["adapter", "pipeline"] | None) -> str:
    """Export the weights of a run's newest checkpoint, or of the one the path names.

    Returns:
        Lines on what was written, how to load it, and any warnings.
    """
    refuse_taken(directory)
    config = read_config_at(run)
    kind = kind or ("pipeline" if config.model.adapter is None else "adapter")
    if kind == "adapter" and config.model.adapter is None:
        raise ConfigError(
            "the run trained the language model in full (model.adapter is absent), so there is no "
            "adapter to export; use --format pipeline"
        )
    quiet_libraries()
    found = find_checkpoint(run)
    step = found.checkpoint.step
    described = describe_training(found.folder, config, step=step)
    model = find_model(config.model.path)
    readme = _export_model(found, model, described, directory, kind=kind)
    for name, content in described.png_files.items():
        write_atomically(directory / name, content)
    folder = shlex.quote(str(directory))
    needs_base = kind == "adapter" and Path(model.path).exists()
    of_base = f" --base {shlex.quote(model.path)}" if needs_base else ""
    shown = " and images of held-out prompts" if described.png_files else ""
    return (
        f"{directory}: weights of step {step}\n"
        f"look at it first: {readme} is its page, with prompts{shown}; "
        "replace YOUR-NAME in it\n"
        f"generate images:  python {folder}/{PROGRAM} 'PROMPT'{of_base}\n"
        f"publish it:       hf upload YOUR-NAME/{shlex.quote(directory.resolve().name)} {folder}"
    )


def _export_model(
    found: FoundCheckpoint,
    model: FoundModel,
    described: Description,
    directory: Path,
    *,
    kind: Literal["adapter", "pipeline"],
) -> Path:
    """Write trained weights in a format that other programs load.

    Args:
        described: How the weights were trained, and what that changed, for the page.
        directory: Output folder, new or empty.
        kind: `adapter`: a folder that peft loads; `pipeline`: one that the model's own class loads.

    Returns:
        Path of the page, which shows how to generate an image.
    """
    config = found.config
    base, family = model.path, model.family
    pipeline = family.load_pipeline(base, dtype=DTYPES[config.model.dtype])
    policy = family.build_policy(config.without_reference(), pipeline)
    policy.load_state_tensors(found.evaluated())
    embedded, is_edit = EMBEDDED.get(config.model.path), config.data.sources > 0
    settings = StockSettings(
        base=base,
        embedded=None if embedded is None else config.model.path,
        known_form=None if embedded is None else embedded.known_form(is_edit=is_edit),
        dtype=config.model.dtype,
        rollout=config.rollout,
        decode=config.decode,
        license=find_license(base) if embedded is None else _TINY_LICENSE,
        summary=described.summary,
        results=described.results,
        training=described.training,
        groups=described.groups,
        prompt=described.example or _example_prompt(config, family),
        num_sources=config.data.sources,
        notes=_notes(config),
        method=_METHODS[config.train.method],
        name=described.name,
    )
    with storage_errors("write", directory):
        family.export(policy, pipeline, settings, directory, kind=kind)
        # safetensors writes files that only their owner can read.
        for path in directory.rglob("*.safetensors"):
            shutil.copymode(directory / README, path)
    return directory / README


def _notes(config: Config) -> tuple[str, ...]:
    notes = []
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


def _example_prompt(config: Config, family: ModelFamily) -> str:
    """Prompt for a page: the embedded model only knows prompts of its own world."""
    is_edit = config.data.sources > 0
    if (embedded := EMBEDDED.get(config.model.path)) is not None:
        return embedded.example_prompt(is_edit=is_edit)
    if family.TEXT_RULE is None:
        return "three red cups on a wooden table"
    return 'write "OPEN" instead' if is_edit else 'a red sign that says "OPEN"'
