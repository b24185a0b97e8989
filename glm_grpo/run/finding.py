"""Find the checkpoint that a path means, and name the command that continues a run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from glm_grpo.config import Config, shell_override
from glm_grpo.errors import CheckpointError
from glm_grpo.run.checkpoints import (
    Checkpoint,
    load_checkpoint,
    newest_checkpoint,
)
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder, step_of


@dataclass(frozen=True)
class FoundCheckpoint:
    """A whole checkpoint, and the run that saved it."""

    folder: RunFolder
    config: Config
    checkpoint: Checkpoint

    def evaluated(self) -> Mapping[str, Tensor]:
        """Read the weights that the run evaluated: their moving average if it has one."""
        has_average = self.config.eval.ema_decay is not None
        return self.checkpoint.tensors["average" if has_average else "policy"]


def find_checkpoint(path: Path) -> FoundCheckpoint:
    """Find the newest checkpoint of a run folder, or the checkpoint that a path names."""
    folder, named = split_path(path)
    config = read_config(folder)
    return FoundCheckpoint(folder, config, load_checkpoint(named or newest_or_refuse(folder)))


def newest_or_refuse(folder: RunFolder) -> Path:
    """Find the newest checkpoint of a run."""
    newest = newest_whole(folder)
    if newest is None:
        raise CheckpointError(
            f"{folder.path} has no checkpoint yet; let the run reach "
            "train.checkpoint_every, or continue it with train.resume"
        )
    return newest


def newest_whole(folder: RunFolder) -> Path | None:
    """Find the newest intact checkpoint; None if the run has saved none."""
    newest = newest_checkpoint(folder)
    if newest is None and any(folder.checkpoints_dir.glob("step-*")):
        raise CheckpointError(
            f"no checkpoint in {folder.checkpoints_dir} is whole: the warnings above say why; "
            "restore one from a copy, or start a new run in another folder"
        )
    return newest


def start_step(config: Config) -> int | None:
    """Step of the checkpoint in `model.start_from`; None if it names none."""
    start = config.model.start_from
    named = None if start is None else split_path(Path(start))[1]
    return None if named is None else step_of(named)


def read_config_at(path: Path) -> Config:
    """Read the config of a run from a path to its folder or to one of its checkpoints."""
    return read_config(split_path(path)[0])


def split_path(path: Path) -> tuple[RunFolder, Path | None]:
    """Split a path into the run folder and, if the path names one, the checkpoint in it."""
    path = real_path(path)
    if path.parent.name == RunFolder(path).checkpoints_dir.name and step_of(path) is not None:
        return RunFolder(path.parent.parent), path
    return RunFolder(path), None


def real_path(path: Path) -> Path:
    """Resolve links: two names of a folder are one run, with one lock."""
    return Path(os.path.realpath(path))


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
