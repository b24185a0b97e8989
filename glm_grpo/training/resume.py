"""Choose the run folder, and the checkpoint from which a run resumes."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from torch import Tensor

from glm_grpo.config import (
    LONGEST_NOTES,
    Config,
    config_differences,
    flatten,
    local_paths,
    set_key,
    shell_override,
    to_yaml,
    with_absolute_paths,
)
from glm_grpo.config.composition import is_dated
from glm_grpo.errors import CheckpointError, ConfigError, GlmGrpoError, StorageError
from glm_grpo.output import counted, printable
from glm_grpo.run.checkpoints import (
    Checkpoint,
    load_checkpoint,
    newest_checkpoint,
    verify_checkpoint,
)
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import (
    RunFolder,
    leftover_of,
    remove_leftovers,
    step_of,
    storage_errors,
    write_atomically,
)
from glm_grpo.run.lock import LOCK_NAME, RunLock
from glm_grpo.run.origin import (
    Origin,
    changed_prompts,
    changed_versions,
    describe_changes,
    read_origin,
    write_origin,
)
from glm_grpo.run.tables import read_metrics, stored_steps
from glm_grpo.training.distributed.processes import ALONE, Processes
from rewards.options import changeable_keys

logger = logging.getLogger(__name__)

_MOST_SHOWN = 3
"""Changed keys, at most, whose values an error shows."""

AUTO = "auto"
"""Value of `train.resume` that finds the run automatically."""

_OF_HYDRA = frozenset({".hydra", "train.log"})
"""Files that Hydra writes into its own folder, possibly the run's, before it calls us."""

_DATED = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d.*")
"""Folder names made by `configs/run/dated.yaml`, with any suffix for runs in the same second."""

_MOST_NAMED = 8
"""Largest number of files and folders that an error lists."""


def resume_command(path: Path, *more: str) -> str:
    """Command that continues a run with its own config, to be pasted into a shell.

    Args:
        path: Run folder, or a checkpoint in it.
        more: Further words, `key=value`.
    """
    script = sys.argv[0]
    is_clone = Path(script).name == "train.py"
    program = f"python {shlex.quote(script)}" if is_clone else "glm-grpo train"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        # Other options of the launcher are known to nobody here.
        target = shlex.quote(script) if is_clone else "-m glm_grpo train"
        program = f"accelerate launch --num_processes {processes} {target}"
    return " ".join([program, shell_override("train.resume", str(path)), *more])


@dataclass(frozen=True)
class OpenedRun:
    """A run folder that is open for writing.

    Attributes:
        checkpoint: Checkpoint to resume from; None for a new run.
        lock: Keeps other runs out of the folder; only the main process holds it.
        is_finished: Whether all steps are done, and the last evaluation is stored.
    """

    folder: RunFolder
    checkpoint: Checkpoint | None
    lock: RunLock
    is_finished: bool = False


@dataclass(frozen=True)
class _Found:
    folder: RunFolder
    checkpoint: Path | None
    is_finished: bool = False


def open_run(config: Config, processes: Processes = ALONE) -> OpenedRun:
    """Find or create the run folder according to `train.resume`.

    The main process searches with its own config, because names with the time of day differ between
    processes. It verifies the checkpoint; every process then reads it.

    Absent: a new folder. `auto`: the run in `run_dir`; if that is a dated folder, otherwise the
    newest unfinished sibling run with the same settings; otherwise a new one. A path: that run
    from its newest checkpoint, or from the checkpoint that the path names.

    Raises:
        CheckpointError: There is no such run, it has other settings, or its checkpoint is damaged.
        ConfigError: A new run's folder already contains a run or something else.
        StorageError: The folder lacks part of what the run recorded, is in use by another run, or
            cannot be created.
        PeerError: Another process failed at it.
    """
    lock = RunLock()
    found = processes.on_main(lambda: _find_run(config, lock))
    if found.checkpoint is None:
        return OpenedRun(found.folder, None, lock)
    with processes.together():
        checkpoint = load_checkpoint(found.checkpoint)
        # Reports a misfit before a model is loaded.
        checkpoint.run_state()
    return OpenedRun(found.folder, checkpoint, lock, found.is_finished)


def _find_run(config: Config, lock: RunLock) -> _Found:
    resume = config.train.resume
    place = config.run_dir if resume is None or resume == AUTO else resume
    with storage_errors("open", Path(place)):
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
    """A checkpoint and its run."""

    folder: RunFolder
    config: Config
    checkpoint: Checkpoint

    @property
    def evaluated(self) -> Mapping[str, Tensor]:
        """Weights that the run evaluated: their moving average if it has one."""
        has_average = self.config.eval.ema_decay is not None
        return self.checkpoint.tensors["average" if has_average else "policy"]


def find_checkpoint(path: Path) -> FoundCheckpoint:
    """Find the newest checkpoint of a run folder, or the checkpoint that a path names.

    Raises:
        CheckpointError: There is no run, or it has no intact checkpoint.
    """
    folder, named = _split(path)
    config = read_config(folder)
    return FoundCheckpoint(folder, config, load_checkpoint(named or _newest_or_refuse(folder)))


def pin_start(
    config: Config, going_on_from: Checkpoint | None, processes: Processes = ALONE
) -> Config:
    """Replace the run folder in `model.start_from` by its newest checkpoint.

    That run may continue meanwhile; the start of this run, and its reference, stay the same.

    Args:
        going_on_from: Checkpoint of this run, which stores the step of the start; None: a new run,
            which starts from the newest checkpoint.
        processes: Processes of the run; the main one searches.

    Returns:
        The config. The checkpoint may be gone by now, so code that needs its contents has to check.
    """
    start = config.model.start_from
    if start is None:
        return config
    begun = None if going_on_from is None else going_on_from.run_state().start_step
    path = processes.on_main(lambda: _find_start(Path(start), begun))
    model = config.model.model_copy(update={"start_from": str(path)})
    return config.model_copy(update={"model": model})


def start_step(config: Config) -> int | None:
    """Step of the checkpoint that `pin_start` chose; None if the run starts from none."""
    start = config.model.start_from
    named = None if start is None else _split(Path(start))[1]
    return None if named is None else step_of(named)


def _find_start(start: Path, begun: int | None) -> Path:
    folder, named = _split(start)
    if named is not None:
        return named
    if begun is not None:
        return folder.checkpoint_dir(begun)
    read_config(folder)
    return _newest_or_refuse(folder)


def _newest_or_refuse(folder: RunFolder) -> Path:
    newest = _newest_whole(folder)
    if newest is None:
        raise CheckpointError(
            f"{folder.path} has no checkpoint yet; let the run reach "
            "train.checkpoint_every, or continue it with train.resume"
        )
    return newest


def read_config_at(path: Path) -> Config:
    """Read the config of a run from a path to its folder or to one of its checkpoints."""
    return read_config(_split(path)[0])


def _new_run(config: Config, lock: RunLock) -> _Found:
    path = _real(Path(config.run_dir))
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
    return _Found(folder, None)


def keep_origin(opened: OpenedRun, origin: Origin, config: Config) -> None:
    """Store what a run begins with; refuse to resume it with something else.

    Only the process that writes the run folder may call this.

    Args:
        origin: What the run would be trained with now.

    Raises:
        CheckpointError: Other held-out prompts; or other training prompts, model, files or code,
            without `train.resume_with_changes`.
        StorageError: The origin cannot be read or written.
    """
    folder = opened.folder
    stored, notes = read_origin(folder), read_config(folder).run.notes
    # Without a checkpoint, everything recorded is replaced.
    if stored is not None and opened.checkpoint is not None:
        changes = _accepted_changes(folder, stored, origin, config)
        origin = replace(
            origin,
            began=stored.began,
            # With that of a start that is gone by now.
            files={**stored.files, **origin.files},
            changed=stored.changed_in(origin),
            devices=stored.devices_with(origin),
            shared=stored.shared_with(origin),
        )
        if changes:
            note = printable(f"changed after step {opened.checkpoint.step}: {'; '.join(changes)}")
            logger.warning("%s", note)
            # Earlier notes give way: this one is nowhere else.
            kept = (notes or "")[: max(0, LONGEST_NOTES - len(note) - 1)]
            notes = "\n".join(filter(None, [kept, note]))[:LONGEST_NOTES]
    settings = _settings(config)
    # Where files and scorers are now, which evaluations read too.
    found = (key for key in changeable_keys(config) if key.startswith(("reward.", "loss.")))
    moved = {key: settings[key] for key in (*_compared_by_content(folder, config), *found)}
    # A run that is extended keeps its new length for the next resume.
    _update_config(folder, {**moved, "train.steps": config.train.steps, "run.notes": notes})
    # Last: after a kill before it, the change is noted again, not forgotten.
    write_origin(folder, origin)


def _settings(config: Config) -> dict[str, object]:
    return flatten(with_absolute_paths(config).model_dump(mode="json"))


def _accepted_changes(
    folder: RunFolder, stored: Origin, origin: Origin, config: Config
) -> list[str]:
    """Describe what changed, unless it is refused; see `keep_origin`."""
    start = shell_override("model.start_from", str(folder.path))
    new_run = f"start a new run with {start} and another run_dir"
    settings, before = _settings(config), _settings(read_config(folder))
    gone = [key for key in stored.files.keys() - origin.files if settings[key] != before[key]]
    if gone:
        raise CheckpointError(
            f"{gone[0]} = {settings[gone[0]]}: the run in {folder.path} began with "
            f"{before[gone[0]]}, and the files of the two cannot be compared; give the path of the "
            "same files"
        )
    held_out = changed_prompts(stored.held_out, origin.held_out)
    if held_out:
        evaluated = shell_override("data.eval_path", str(settings["data.eval_path"]))
        raise CheckpointError(
            f"data.eval_path = {config.data.eval_path}: these are not the held-out prompts that "
            f"the run in {folder.path} was evaluated on ({held_out}), so its scores before and "
            "after could not be compared. Restore them, evaluate a checkpoint on the new ones "
            f"(glm-grpo eval {shlex.quote(str(folder.path))} {evaluated}), or {new_run}"
        )
    changes = describe_changes(stored, origin, settings)
    if changes and not config.train.resume_with_changes:
        raise CheckpointError(
            f"the run in {folder.path} was trained with something else: {'; '.join(changes)}. "
            f"Restore what it was trained with, {new_run}, or repeat the command with "
            "train.resume_with_changes=true: the log and run.notes then state the changes"
        )
    return changes + changed_versions(stored.versions, origin.versions)


def _update_config(folder: RunFolder, changes: Mapping[str, object]) -> None:
    before = read_config(folder)
    values = before.model_dump(mode="json")
    for key, value in changes.items():
        set_key(values, key, value)
    after = Config.model_validate(values)
    if after != before:
        write_atomically(folder.config_path, to_yaml(after).encode())


def _refuse_what_is_there(folder: RunFolder) -> None:
    """Refuse to begin a run where it could overwrite something or take it for its own.

    A start that failed before the first record (for instance, without weights) leaves its config,
    origin and lock, which may be overwritten. Empty folders are fine too, such as a mount point.
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


def _make_dated(path: Path) -> Path:
    """Create a new folder: another run may have begun in the same second."""
    for number in itertools.count(1):
        place = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            place.mkdir(parents=True)
            break
    return place


def refuse_other_settings(config: Config) -> None:
    """Refuse to resume a run that is named with settings other than its own.

    Before anything that these settings name is looked for: `open_run` refuses the same.

    Raises:
        CheckpointError: Settings differ, or the named run cannot be read.
    """
    resume = config.train.resume
    if resume is None:
        return
    place = Path(config.run_dir if resume == AUTO else resume)
    folder, _ = _split(place)
    if resume != AUTO or folder.config_path.exists():
        _refuse_other_settings(place, config)


def _refuse_other_settings(path: Path, config: Config) -> None:
    folder, _ = _split(path)
    stored = read_config(folder)
    by_content = _compared_by_content(folder, config)
    differences = [
        key
        for key in config_differences(*map(with_absolute_paths, (stored, config)))
        if key not in by_content
    ]
    if differences:
        is_longer = config.train.steps > stored.train.steps
        longer = f". To train longer, {_train_longer(folder, stored)}" if is_longer else ""
        raise CheckpointError(
            f"the run in {folder.path} has other settings in its config.yaml "
            f"({_list_changes(stored, config, differences)}); start a new run without "
            f"train.resume, or continue with the run's own: {resume_command(path)}{longer}"
        )


def _existing_run(path: Path, config: Config, lock: RunLock) -> _Found:
    folder, checkpoint_path = _split(path)
    _refuse_other_settings(path, config)
    lock.acquire(folder.path)
    # A kill during a replacement may have renamed a checkpoint.
    remove_leftovers(folder.checkpoints_dir)
    if checkpoint_path is None:
        checkpoint_path = _newest_whole(folder)
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
        longer = _train_longer(folder, config)
        said = f"is finished after {counted(done, 'step')}. To train longer, {longer}"
        logger.info("%s %s", folder.path, said)
    else:
        begin = "its start" if checkpoint_path is None else checkpoint_path.name
        logger.info("continuing %s from %s", folder.path, begin)
    return _Found(folder, checkpoint_path, is_finished)


def _compared_by_content(folder: RunFolder, config: Config) -> set[str]:
    """Keys of files that `keep_origin` compares by content, because files may have been moved."""
    origin = read_origin(folder)
    if origin is None:
        return set()
    return {"data.path", "data.eval_path", *origin.files} & local_paths(config).keys()


def _list_changes(stored: Config, given: Config, keys: Sequence[str]) -> str:
    """Keys with their values; of many, the first keys and the number of the others."""
    if len(keys) > _MOST_SHOWN:
        return f"{', '.join(keys[:_MOST_SHOWN])} and {len(keys) - _MOST_SHOWN} more"
    before, after = flatten(stored.model_dump()), flatten(given.model_dump())
    return ", ".join(f"{key}: {before.get(key)} in the run, {after.get(key)} here" for key in keys)


def _train_longer(folder: RunFolder, config: Config) -> str:
    """What to do for more steps than a run was given; begins in lower case."""
    steps = 2 * config.train.steps
    train = config.train.model_copy(update={"steps": steps})
    if not config_differences(config, config.model_copy(update={"train": train})):
        return f"raise train.steps: {resume_command(folder.path, f'train.steps={steps}')}"
    return (
        f"start a new run with {shell_override('model.start_from', str(folder.path))}: train.steps "
        "can change only in a run that was started with optim.schedule=constant and without "
        "anchor.final_weight, because the cosine schedule and the anchor weight both end at "
        "the last step"
    )


def _newest_whole(folder: RunFolder) -> Path | None:
    """Find the newest intact checkpoint; None if the run has saved none.

    Raises:
        CheckpointError: There are checkpoints, but none is intact.
    """
    newest = newest_checkpoint(folder)
    if newest is None and any(folder.checkpoints_dir.glob("step-*")):
        raise CheckpointError(
            f"no checkpoint in {folder.checkpoints_dir} is whole: the warnings above say why; "
            "restore one from a copy, or start a new run in another folder"
        )
    return newest


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


def _real(path: Path) -> Path:
    """Resolve links: two names of a folder are one run, with one lock."""
    return Path(os.path.realpath(path))


def _split(path: Path) -> tuple[RunFolder, Path | None]:
    """Split a path into the run folder and, if the path names one, the checkpoint in it."""
    path = _real(path)
    if path.parent.name == RunFolder(path).checkpoints_dir.name and step_of(path) is not None:
        return RunFolder(path.parent.parent), path
    return RunFolder(path), None


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
        origin = read_origin(folder)
        if origin is not None:
            return origin.began, str(folder.path)
    written = datetime.fromtimestamp(folder.config_path.stat().st_mtime, UTC)
    return written.isoformat(timespec="seconds"), str(folder.path)


def _has_dated_name(run_dir: Path) -> bool:
    return _DATED.fullmatch("/".join(run_dir.absolute().parts[-2:])) is not None
