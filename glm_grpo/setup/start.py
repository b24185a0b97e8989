"""Find the checkpoint that a run starts from, `model.start_from`."""

from __future__ import annotations

from pathlib import Path

from glm_grpo.config import Config
from glm_grpo.data.places import nearest_beside
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.run.config import read_config
from glm_grpo.run.finding import FoundCheckpoint, find_checkpoint, newest_or_refuse, split_path
from glm_grpo.training.distributed.processes import ALONE, Processes
from rewards.problems import Problem, describe_problems


def pin_start(config: Config, begun: int | None, processes: Processes = ALONE) -> Config:
    """Replace the run folder in `model.start_from` by its newest checkpoint.

    That run may continue meanwhile; the start of this run, and its reference, stay the same.

    Args:
        begun: Step of the checkpoint that this run started from, if it is resumed; None: a new
            run, which starts from the newest checkpoint.
        processes: Processes of the run; the main one searches.

    Returns:
        The config. The checkpoint of a resumed run may be gone by now, so code that needs its
        contents has to check.
    """
    start = config.model.start_from
    if start is None:
        return config
    path = processes.on_main(lambda: _pinned(start, begun))
    model = config.model.model_copy(update={"start_from": str(path)})
    return config.model_copy(update={"model": model})


def _pinned(start: str, begun: int | None) -> Path:
    folder, named = split_path(Path(start))
    if named is not None:
        return named
    if begun is not None:
        return folder.checkpoint_dir(begun)
    _refuse_absent(start)
    read_config(folder)
    return newest_or_refuse(folder)


def _refuse_absent(path: str) -> None:
    if Path(path).exists():
        return
    nearest = nearest_beside(path)
    meant = "." if nearest is None else f"; did you mean {nearest}?"
    raise CheckpointError(
        f"model.start_from = {path!r} does not exist{meant} A run starts from its weights, "
        "and its KL refers to them when it is resumed: restore it, or name another"
    )


def find_start(config: Config) -> FoundCheckpoint | None:
    """Find and verify the checkpoint in `model.start_from`; None if it is not set."""
    path = config.model.start_from
    if path is None:
        return None
    _refuse_absent(path)
    found = find_checkpoint(Path(path))
    own, theirs = config.model.adapter, found.config.model.adapter
    if own != theirs:
        rule = f"was trained with model.adapter = {theirs}, and this run has {own}"
        remedy = (
            "set model.adapter as in its config.yaml, or export that run as a pipeline (glm-grpo "
            "export) and set model.path to it"
        )
        raise ConfigError(describe_problems([Problem("model.start_from", path, rule, remedy)]))
    return found
