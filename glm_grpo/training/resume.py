"""Which run folder a run writes to, and where it goes on from."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from glm_grpo.config import Config, config_differences, from_yaml, to_yaml
from glm_grpo.errors import CheckpointError, ConfigError, GlmGrpoError, StorageError
from glm_grpo.storage import (
    RunFolder,
    remove_leftovers,
    step_of,
    storage_errors,
    write_atomically,
)
from glm_grpo.training.checkpoint import Checkpoint, load_checkpoint, newest_checkpoint
from glm_grpo.training.run_lock import RunLock
from glm_grpo.training.team import ALONE, Team

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Value of `train.resume` that looks for the run itself."""


@dataclass(frozen=True)
class OpenedRun:
    """A run folder that may be written to.

    Attributes:
        folder: Holds config.yaml.
        checkpoint: To go on from; None for a run at its start.
        lock: Keeps other runs out of the folder; held by the main process alone.
    """

    folder: RunFolder
    checkpoint: Checkpoint | None
    lock: RunLock


@dataclass(frozen=True)
class _Found:
    folder: RunFolder
    checkpoint: Path | None


def open_run(config: Config, team: Team = ALONE) -> OpenedRun:
    """Finds or makes the run folder as `train.resume` asks.

    The main process looks, with its own config: names that hold the time of day differ between
    processes. Every process then reads the checkpoint.

    Absent: a new folder. `auto`: the run in `run_dir`, or else the newest unfinished run beside it
    (in the dated folders) with the same settings, or else a new one. A path: that run from its
    newest checkpoint, or from the checkpoint the path names.

    Raises:
        CheckpointError: There is no such run, it was made with other settings, or its checkpoint
            is damaged.
        StorageError: The folder holds a run already, is written to by another one, or cannot be
            made.
        PeerError: Another process failed at it.
    """
    lock = RunLock()
    found = team.on_main(lambda: _find_run(config, lock))
    if found.checkpoint is None:
        return OpenedRun(found.folder, None, lock)
    with team.together():
        checkpoint = load_checkpoint(found.checkpoint)
    return OpenedRun(found.folder, checkpoint, lock)


def _find_run(config: Config, lock: RunLock) -> _Found:
    resume = config.train.resume
    if resume is None:
        return _new_run(config, lock)
    if resume != AUTO:
        return _existing_run(Path(resume), config, lock)
    if RunFolder(Path(config.run_dir)).config_path.exists():
        return _existing_run(Path(config.run_dir), config, lock)
    newest = _newest_unfinished_run(Path(config.run_dir), config)
    if newest is not None:
        return _existing_run(newest, config, lock)
    logger.info("train.resume=auto: no unfinished run with these settings; a new one begins")
    return _new_run(config, lock)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint with the config of its run."""

    config: Config
    checkpoint: Checkpoint


def find_checkpoint(path: Path) -> FoundCheckpoint:
    """The newest checkpoint of a run folder, or the checkpoint a path names.

    Raises:
        CheckpointError: There is no run, or no whole checkpoint in it.
    """
    folder, checkpoint_path = _split(path)
    config = read_config(folder)
    checkpoint_path = checkpoint_path or newest_checkpoint(folder)
    if checkpoint_path is None:
        raise CheckpointError(
            f"{folder.path} has no whole checkpoint yet; let the run reach "
            "train.checkpoint_every, or go on with it by train.resume"
        )
    return FoundCheckpoint(config, load_checkpoint(checkpoint_path))


def read_config(folder: RunFolder) -> Config:
    """The resolved config a run was started with.

    Raises:
        CheckpointError: The folder holds no run.
        ConfigError: Its config.yaml is not valid any more.
    """
    if not folder.config_path.is_file():
        raise CheckpointError(
            f"{folder.path} holds no run (there is no config.yaml in it); give the folder of a "
            "run, such as outputs/<date>/<time>"
        )
    with storage_errors("read", folder.config_path):
        content = folder.config_path.read_bytes()
    try:
        return from_yaml(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{folder.config_path} is not UTF-8 ({error}); restore it") from error


def _new_run(config: Config, lock: RunLock) -> _Found:
    folder = RunFolder(_make_run_dir(config.run_dir))
    lock.acquire(folder.path)
    # A start that failed (no weights, say) leaves a config and no record: nothing is lost there.
    if folder.metrics_path.exists():
        raise StorageError(
            f"run_dir is {config.run_dir!r}: it holds a run already, and nothing is overwritten; "
            "choose another folder, or go on with train.resume=auto"
        )
    write_atomically(folder.config_path, to_yaml(config).encode())
    return _Found(folder, None)


def _make_run_dir(run_dir: str) -> Path:
    path = Path(run_dir).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"run_dir = {str(path)!r} cannot be created ({error.strerror or error}): it must be a "
            "folder that can be written to; set run_dir to another one"
        ) from error
    return path


def _existing_run(path: Path, config: Config, lock: RunLock) -> _Found:
    folder, checkpoint_path = _split(path)
    differences = config_differences(read_config(folder), config)
    if differences:
        raise CheckpointError(
            f"the run in {folder.path} was made with other settings ({', '.join(differences)}); go "
            "on with the same ones, or start a new run without train.resume"
        )
    lock.acquire(folder.path)
    # A kill in the midst of a replacement takes a checkpoint's name.
    remove_leftovers(folder.checkpoints_dir)
    checkpoint_path = checkpoint_path or newest_checkpoint(folder)
    if checkpoint_path is None and any(folder.checkpoints_dir.glob("step-*")):
        raise CheckpointError(
            f"no checkpoint in {folder.checkpoints_dir} is whole, and to begin anew would remove "
            "what was recorded; restore one from a copy, or start a new run without train.resume"
        )
    begin = "its start" if checkpoint_path is None else checkpoint_path.name
    logger.info("going on with %s from %s", folder.path, begin)
    return _Found(folder, checkpoint_path)


def _split(path: Path) -> tuple[RunFolder, Path | None]:
    """The run folder a path names, and the checkpoint in it if it names one."""
    path = path.absolute()
    if path.parent.name == RunFolder(path).checkpoints_dir.name and step_of(path) is not None:
        return RunFolder(path.parent.parent), path
    return RunFolder(path), None


def _newest_unfinished_run(run_dir: Path, config: Config) -> Path | None:
    """Among the siblings of a dated run folder, `<root>/<date>/<time>`.

    A run is finished with the last checkpoint and the last evaluation: a term may have failed in
    that one.
    """
    steps = config.train.steps
    for path in sorted(run_dir.parent.parent.glob("*/*/config.yaml"), reverse=True):
        folder = RunFolder(path.parent)
        try:
            is_same = not config_differences(read_config(folder), config)
        except GlmGrpoError:
            # A folder of another project or version is no run to go on with.
            continue
        last = (folder.checkpoint_dir(steps), folder.evaluation_path(steps))
        if is_same and not all(each.exists() for each in last):
            return folder.path
    return None
