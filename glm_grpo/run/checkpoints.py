"""Write and read checkpoints atomically.

A checkpoint is a folder of safetensors files and `checkpoint.json`, which lists them with their
sizes. Nothing is pickled, so opening a checkpoint never runs code that came with it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm_grpo.errors import CheckpointError, NonFiniteError
from glm_grpo.run.folder import (
    RunFolder,
    atomic_directory,
    remove,
    remove_leftovers,
    step_of,
    storage_errors,
)
from glm_grpo.run.tables import describe_misfit

MANIFEST = "checkpoint.json"
FORMAT_VERSION = 2
_REMEDY = "Resume from another checkpoint, or restore this one from a copy."
_OS_ERROR_CODE = re.compile(r"\(os error (\d+)\)")

_logger = logging.getLogger(__name__)

Schema = TypeVar("Schema", bound=BaseModel)


class _OptimizerValues(BaseModel):
    """Optimizer values that are not tensors; see `optimizer_to_tensors`."""

    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


class StoredRunState(BaseModel):
    """Schema of the run state in a checkpoint's metadata; see `RunState`.

    Attributes:
        optimizer: Optimizer state that is not a tensor.
        updates: Number of policy updates done so far.
        loss_scale: Value of the loss scale, and its finite updates in a row; None in checkpoints of
            versions without one.
    """

    optimizer: _OptimizerValues
    updates: int
    best_step: int | None
    best_total: float | None
    skipped_in_a_row: int
    canaries_outside: dict[str, int] = {}
    start_step: int | None = None
    loss_scale: tuple[float, int] | None = None


class _Manifest(BaseModel):
    """Schema of `checkpoint.json`."""

    format: Literal[2]
    step: int
    files: dict[str, Any]
    metadata: dict[str, Any]


class _StoredTensors(Mapping[str, Mapping[str, Tensor]]):
    """File stem -> name -> tensor; each access reads the file."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._files = {Path(name).stem: path / name for name in names}

    def __getitem__(self, stem: str) -> Mapping[str, Tensor]:
        file = self._files[stem]
        with storage_errors("read", file):
            return load_file(file)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint; its tensors are read on access.

    Attributes:
        step: Number of training steps done.
        tensors: File stem -> name -> tensor, on the CPU. An access maps the file, which stays on
            the disk while one of its tensors is in use.
        metadata: JSON values with everything else that the run needs to continue.
    """

    path: Path
    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    metadata: Mapping[str, Any]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the checkpoint's name to errors about contents that do not fit the run."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{self.path / MANIFEST}: {error}") from error

    def run_state(self) -> StoredRunState:
        """Validate the metadata of a checkpoint that a run wrote."""
        return _checked(lambda: StoredRunState.model_validate(self.metadata), self.path / MANIFEST)


def save_checkpoint(
    folder: RunFolder,
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    metadata: Mapping[str, Any],
) -> Path:
    """Write a checkpoint atomically; one of the same step is replaced.

    Args:
        step: Number of training steps done.
        tensors: File stem -> name -> tensor; each stem becomes `<stem>.safetensors`. Tensors that
            share memory are written separately.
        metadata: JSON values, kept in the manifest.

    Raises:
        NonFiniteError: A tensor contains a value that is not finite; earlier checkpoints stay.
    """
    path = folder.checkpoint_dir(step)
    with atomic_directory(path) as temporary:
        files = {}
        for stem, named_tensors in tensors.items():
            file = temporary / f"{stem}.safetensors"
            _save_tensors(file, named_tensors)
            files[file.name] = {"bytes": file.stat().st_size}
        manifest = {
            "format": FORMAT_VERSION,
            "step": step,
            "files": files,
            "metadata": dict(metadata),
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    return path


def verify_checkpoint(path: Path) -> None:
    """Verify that a checkpoint has all its files; safetensors refuses a truncated one."""
    for name in _read_manifest(path).files:
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: {MANIFEST} lists it. {_REMEDY}")
        try:
            with storage_errors("read", file), safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} is not a safetensors file ({error}). {_REMEDY}"
            ) from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint after verifying it."""
    verify_checkpoint(path)
    manifest = _read_manifest(path)
    tensors = _StoredTensors(path, tuple(manifest.files))
    return Checkpoint(path, manifest.step, tensors, manifest.metadata)


def newest_checkpoint(folder: RunFolder, *, before: int | None = None) -> Path | None:
    """Find the newest intact checkpoint; None if there is none.

    A checkpoint that is not intact is skipped with a warning.

    Args:
        before: Only consider checkpoints of steps before this one; None: all.
    """
    for path in reversed(_checkpoints(folder)):
        if before is not None and (step_of(path) or 0) >= before:
            continue
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            _logger.warning("Skipping a damaged checkpoint. %s", error)
        else:
            return path
    return None


def forget_checkpoints_after(folder: RunFolder, step: int) -> None:
    """Remove the checkpoints of later steps, which a run that resumes at `step` writes again.

    Files left half-written by a killed process are removed, too.
    """
    remove_leftovers(folder.checkpoints_dir)
    for path in _checkpoints(folder):
        if (step_of(path) or 0) > step:
            remove(path)


def prune_checkpoints(folder: RunFolder, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints but the newest and the best, and leftovers of killed processes.

    Args:
        keep: How many of the newest to keep, >= 1.
        best_step: Step of the best checkpoint, which is kept regardless of age; None if unknown.
    """
    remove_leftovers(folder.checkpoints_dir)
    for path in _checkpoints(folder)[:-keep]:
        if step_of(path) != best_step:
            remove(path)


def _checkpoints(folder: RunFolder) -> list[Path]:
    steps = {path: step_of(path) for path in folder.checkpoints_dir.glob("step-*")}
    return sorted((path for path in steps if steps[path] is not None), key=lambda p: steps[p] or 0)


def _save_tensors(file: Path, named_tensors: Mapping[str, Tensor]) -> None:
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in named_tensors.items():
        on_cpu = tensor.detach().cpu().contiguous()
        if not on_cpu.isfinite().all():
            raise NonFiniteError(
                f"{file.stem}: {name} contains values that are not finite, and is not saved. In a "
                "new run lower optim.learning_rate or optim.max_grad_norm"
            )
        storage = on_cpu.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, such as tied weights and slices.
        separate[name] = on_cpu.clone() if storage in storages else on_cpu
        storages.add(storage)
    file.touch()
    mode = file.stat().st_mode
    try:
        # Replaces the file by one that only its owner can read.
        save_file(separate, file)
        file.chmod(mode)
    except SafetensorError as error:
        # safetensors wraps the system's error and keeps its code only in the text.
        match = _OS_ERROR_CODE.search(str(error))
        if match is None:
            raise
        raise OSError(int(match.group(1)), str(error)) from error


def _read_manifest(path: Path) -> _Manifest:
    file = path / MANIFEST
    if not file.is_file():
        there = sorted(each.name for each in path.parent.glob("step-*"))
        if not path.exists() and there:
            raise CheckpointError(f"{path}: no such checkpoint; there are {', '.join(there)}")
        raise CheckpointError(f"{file} is missing: it marks a complete checkpoint. {_REMEDY}")
    with storage_errors("read", file):
        content = file.read_bytes()
    return _checked(lambda: _Manifest.model_validate_json(content), file)


def _checked(read: Callable[[], Schema], file: Path) -> Schema:
    try:
        return read()
    except ValidationError as error:
        raise CheckpointError(f"{file} is damaged: {describe_misfit(error)}. {_REMEDY}") from error
