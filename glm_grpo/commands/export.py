"""`glm-grpo export`: write trained weights for other programs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from glm_grpo.builders.export import export_model
from glm_grpo.commands.model_card import describe_training
from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.models.export import describe_sampling
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.run.folder import refuse_taken
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.metrics import outside_codebook_note
from glm_grpo.training.resume import FoundCheckpoint, find_checkpoint, read_config_at


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
    readme = export_model(
        config,
        found.evaluated,
        directory,
        kind=kind,
        note=partial(_outside_codebook_note, found),
        training=describe_training(found.folder, config, step=step),
    )
    return (
        f"{directory}: step {step}; {readme} is its model card and shows how to generate images "
        f"with it; generation_config.json samples as the run did, "
        f"{describe_sampling(config.rollout)}"
    )


def _outside_codebook_note(found: FoundCheckpoint, tokens: int) -> str:
    """Warning about tokens outside the codebook; empty if the metrics lack it."""
    try:
        rows = read_metrics(found.folder)
    except StorageError:
        # The weights are intact, even if the metrics are not.
        return ""
    return outside_codebook_note(rows, step=found.checkpoint.step, tokens=tokens)
