"""Compare the settings of a run with those that it is resumed with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glm_grpo.config import (
    Config,
    can_be_extended,
    config_differences,
    flatten,
    local_paths,
    shell_override,
    with_absolute_paths,
)
from glm_grpo.errors import CheckpointError
from glm_grpo.run.config import read_config
from glm_grpo.run.finding import resume_command, split_path
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.provenance import read_provenance

_MOST_SHOWN = 3
"""Changed keys, at most, whose values an error shows."""


def refuse_other_settings(path: Path, config: Config) -> None:
    """Refuse to resume a run with settings other than its own.

    Args:
        path: Run folder, or a checkpoint in it.
    """
    folder, _ = split_path(path)
    stored = read_config(folder)
    by_content = compared_by_content(folder, config)
    differences = [
        key
        for key in config_differences(*map(with_absolute_paths, (stored, config)))
        if key not in by_content
    ]
    if differences:
        is_longer = config.train.steps > stored.train.steps
        longer = f". To train longer, {explain_longer(folder, stored)}" if is_longer else ""
        raise CheckpointError(
            f"the run in {folder.path} has other settings in its config.yaml "
            f"({_list_changes(stored, config, differences)}); start a new run without "
            f"train.resume, or continue with the run's own: {resume_command(path)}{longer}"
        )


def compared_by_content(folder: RunFolder, config: Config) -> set[str]:
    """Keys of files that are compared by content, because files may have been moved."""
    provenance = read_provenance(folder)
    if provenance is None:
        return set()
    return {"data.path", "data.eval_path", *provenance.files} & local_paths(config).keys()


def _list_changes(stored: Config, given: Config, keys: Sequence[str]) -> str:
    """Keys with their values; of many, the first keys and the number of the others."""
    if len(keys) > _MOST_SHOWN:
        return f"{', '.join(keys[:_MOST_SHOWN])} and {len(keys) - _MOST_SHOWN} more"
    before, after = flatten(stored.model_dump()), flatten(given.model_dump())
    return ", ".join(f"{key}: {before.get(key)} in the run, {after.get(key)} here" for key in keys)


def train_longer(folder: RunFolder, config: Config) -> str:
    """Command, or what to do, for more steps than a run was given; begins in lower case."""
    if can_be_extended(config):
        return resume_command(folder.path, f"train.steps={2 * config.train.steps}")
    return f"start a new run with {shell_override('model.start_from', str(folder.path))}"


def explain_longer(folder: RunFolder, config: Config) -> str:
    """The same in a sentence, with the reason; begins in lower case."""
    longer = train_longer(folder, config)
    if can_be_extended(config):
        return f"raise train.steps: {longer}"
    return (
        f"{longer}: train.steps can change only in a run that was started with "
        "optim.schedule=constant and without sft.final_weight, because the cosine schedule and the "
        "weight of targets both end at the last step"
    )
