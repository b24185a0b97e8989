"""Choose the run folder: a new one, or that of a run that goes on."""

from __future__ import annotations

import itertools
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from glm_grpo.config import Config, config_differences, to_yaml, with_absolute_paths
from glm_grpo.config.composition import is_dated
from glm_grpo.errors import CheckpointError, ConfigError, GlmGrpoError, StorageError
from glm_grpo.output import counted
from glm_grpo.run.checkpoints import verify_checkpoint
from glm_grpo.run.config import read_config
from glm_grpo.run.differences import explain_longer, refuse_other_settings
from glm_grpo.run.finding import newest_whole, real_path, split_path
from glm_grpo.run.folder import (
    RunFolder,
    leftover_of,
    remove_leftovers,
    step_of,
    storage_errors,
    write_atomically,
)
from glm_grpo.run.lock import LOCK_NAME, RunLock
from glm_grpo.run.provenance import read_provenance
from glm_grpo.run.tables import read_metrics, stored_steps

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Value of `train.resume` that finds the run automatically."""

_OF_HYDRA = frozenset({".hydra", "train.log"})
"""Files that Hydra writes into its own folder, possibly the run's, before it calls us."""

_DATED = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d.*")
"""Folder names made by `configs/run/dated.yaml`, with any suffix for runs in the same second."""

_MOST_NAMED = 8
"""Largest number of files and folders that an error lists."""


@dataclass(frozen=True)
class ResumedRun:
    """A run that goes on.

    Attributes:
        checkpoint: Folder of its checkpoint; None: it has saved none, and begins anew.
        is_finished: Whether all steps are done, and the last evaluation is stored.
    """

    folder: RunFolder
    checkpoint: Path | None
    is_finished: bool


def find_resumed(config: Config, lock: RunLock) -> ResumedRun | None:
    """Find and lock the run that `train.resume` means; None: a new run begins.

    Absent: a new run. `auto`: the run in `run_dir`; if that is a dated folder, otherwise the newest
    unfinished sibling run with the same settings; otherwise a new one. A path: that run from its
    newest checkpoint, or from the checkpoint that the path names.
    """
    resume = config.train.resume
    if resume is None:
        return None
    place = Path(config.run_dir if resume == AUTO else resume)
    with storage_errors("open", place):
        if resume != AUTO or RunFolder(place).config_path.exists():
            return _existing_run(place, config, lock)
        newest = _newest_unfinished_run(place, config)
        if newest is not None:
            return _existing_run(newest, config, lock)
    logger.info("train.resume=auto: no unfinished run with these settings; a new one begins")
    return None


def make_run_folder(config: Config, lock: RunLock) -> RunFolder:
    """Make and lock the folder of a new run, and store its config.

    Only the main process may call this: names with the time of day differ between processes.
    """
    with storage_errors("open", Path(config.run_dir)):
        path = real_path(Path(config.run_dir))
        if is_dated(config.run_dir):
            path = _make_dated(path)
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path)
        # Check before locking, because the lock file would be a trace in someone else's folder, and
        # again afterwards, because another run may have begun in between.
        _refuse_what_is_there(folder)
        lock.acquire(folder.path)
        _refuse_what_is_there(folder)
        # Of a start that failed.
        folder.origin_path.unlink(missing_ok=True)
        write_atomically(folder.config_path, to_yaml(with_absolute_paths(config)).encode())
        return folder


def _existing_run(path: Path, config: Config, lock: RunLock) -> ResumedRun:
    folder, checkpoint_path = split_path(path)
    refuse_other_settings(path, config)
    lock.acquire(folder.path)
    # A kill during a replacement may have renamed a checkpoint.
    remove_leftovers(folder.checkpoints_dir)
    if checkpoint_path is None:
        checkpoint_path = newest_whole(folder)
    else:
        verify_checkpoint(checkpoint_path)
    done = 0 if checkpoint_path is None else step_of(checkpoint_path) or 0
    if done > config.train.steps:
        raise CheckpointError(
            f"train.steps = {config.train.steps}: {folder.path} has done {done}; set it to {done} "
            f"or more, or go on from an earlier checkpoint ({folder.checkpoints_dir}/step-...)"
        )
    _refuse_lost_records(folder, config, done)
    is_finished = done == config.train.steps and folder.evaluation_path(done).exists()
    if is_finished:
        longer = explain_longer(folder, config)
        said = f"is finished after {counted(done, 'step')}. To train longer, {longer}"
        logger.info("%s %s", folder.path, said)
    else:
        begin = "its start" if checkpoint_path is None else checkpoint_path.name
        logger.info("continuing %s from %s", folder.path, begin)
    return ResumedRun(folder, checkpoint_path, is_finished)


def _make_dated(path: Path) -> Path:
    """Create a new folder: another run may have begun in the same second."""
    for number in itertools.count(1):
        place = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            place.mkdir(parents=True)
            break
    return place


def _refuse_what_is_there(folder: RunFolder) -> None:
    """Refuse to begin a run where it could overwrite something or take it for its own.

    A start that failed before the first record (for instance, without weights) leaves its config,
    provenance and lock, which may be overwritten. Empty folders are fine too, such as a mount
    point.
    """
    names = {path.name for path in folder.path.iterdir() if not _is_empty_folder(path)}
    own = {*_OF_HYDRA, LOCK_NAME}
    if LOCK_NAME in names:
        own |= {folder.origin_path.name, folder.config_path.name}
        own |= {name for name in names if leftover_of(Path(name)) == folder.config_path.name}
    others = sorted(names - own)
    if others:
        more = ", ..." if len(others) > _MOST_NAMED else ""
        raise ConfigError(
            f"run_dir = {str(folder.path)!r} is not empty ({', '.join(others[:_MOST_NAMED])}"
            f"{more}): a run starts in a new or empty folder, and nothing is overwritten; choose "
            "another folder, or continue the run in it with train.resume=auto"
        )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _refuse_lost_records(folder: RunFolder, config: Config, done: int) -> None:
    """Refuse to resume if that would remove the only records of a run.

    Resuming at a step removes everything recorded after it. Every step gets its line in
    metrics.jsonl before its checkpoint.
    """
    steps = [int(row["step"] or 0) for row in read_metrics(folder)]
    kept = [recorded for recorded in steps if recorded <= done]
    if done > 0 and kept[-1:] != [done]:
        raise StorageError(
            f"{folder.metrics_path} has no line of step {done}, of which there is a checkpoint, as "
            "its last up to there: lines were lost. Restore it from a copy, go on from an earlier "
            f"checkpoint ({folder.checkpoints_dir}/step-...) by train.resume, or start a new run "
            "in another folder"
        )
    last = max([*steps, *stored_steps(folder.rollouts_dir)], default=0)
    every = max(config.train.checkpoint_every, read_config(folder).train.checkpoint_every)
    if done == 0 and last > every:
        raise CheckpointError(
            f"{folder.path} has no checkpoint, though it recorded {last} steps and saved "
            f"every {every}: to begin anew would remove those records. Restore "
            f"{folder.checkpoints_dir} from a copy, or start a new run in another folder"
        )


def _newest_unfinished_run(run_dir: Path, config: Config) -> Path | None:
    """Search the siblings of a dated folder, `<root>/<date>/<time>`; other folders have none.

    A run is finished after the last checkpoint and the last evaluation, because a term may fail in
    that evaluation.
    """
    if not _has_dated_name(run_dir):
        return None
    steps = config.train.steps
    given = with_absolute_paths(config)
    configs = run_dir.parent.parent.glob("*/*/config.yaml")
    runs = [RunFolder(path.parent) for path in configs if _has_dated_name(path.parent)]
    for folder in sorted(runs, key=_began, reverse=True):
        try:
            stored = with_absolute_paths(read_config(folder))
            is_same = not config_differences(stored, given)
            last = (folder.checkpoint_dir(steps), folder.evaluation_path(steps))
        except GlmGrpoError:
            # A folder of another project or version cannot be resumed.
            continue
        if is_same and not all(each.exists() for each in last):
            return folder.path
    return None


def _began(folder: RunFolder) -> tuple[str, str]:
    """When a run began, by the clock that is never put back; its name is of local time."""
    with suppress(StorageError):
        provenance = read_provenance(folder)
        if provenance is not None:
            return provenance.began, str(folder.path)
    written = datetime.fromtimestamp(folder.config_path.stat().st_mtime, UTC)
    return written.isoformat(timespec="seconds"), str(folder.path)


def _has_dated_name(run_dir: Path) -> bool:
    return _DATED.fullmatch("/".join(run_dir.absolute().parts[-2:])) is not None
