"""`glm-grpo export`: write trained weights for other programs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from glm_grpo.builders.export import export_model
from glm_grpo.builders.models import model_path
from glm_grpo.commands.model_card import describe_training
from glm_grpo.errors import ConfigError
from glm_grpo.models.export import PROGRAM
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.run.folder import refuse_taken, write_atomically
from glm_grpo.training.resume import find_checkpoint, read_config_at


def export_run(run: Path, directory: Path, *, kind: Literal["adapter", "pipeline"] | None) -> str:
    """Export the weights of a run's newest checkpoint, or of the one the path names.

    Returns:
        Lines on what was written, how to load it, and any warnings.

    Raises:
        ConfigError: An adapter is requested, but none was trained, or the folder is not empty.
        CheckpointError: The path contains no run or no intact checkpoint.
        StorageError: The folder cannot be written.
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
    readme = export_model(
        config,
        found.evaluated,
        directory,
        kind=kind,
        prompt=described.example,
        results=described.results,
        training=described.training,
    )
    for name, picture in described.pictures.items():
        write_atomically(directory / name, picture)
    folder = shlex.quote(str(directory))
    base = model_path(config.model.path)
    needs_base = kind == "adapter" and Path(base).exists()
    of_base = f" --base {shlex.quote(base)}" if needs_base else ""
    shown = " and pictures of held-out prompts" if described.pictures else ""
    return (
        f"{directory}: weights of step {step}\n"
        f"look at it first: {readme} is its page, with prompts{shown}\n"
        f"generate images:  python {folder}/{PROGRAM} 'PROMPT'{of_base}\n"
        f"publish it:       hf upload YOUR-NAME/{shlex.quote(directory.resolve().name)} {folder}"
    )
