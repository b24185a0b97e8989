"""Checkpoints, written whole or not at all, and verified byte by byte before they are used.

A checkpoint is a folder of safetensors files and `checkpoint.json`, which lists them with their
SHA-256. Nothing is pickled, so opening a checkpoint never runs code that came with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, Strict, ValidationError
from pydantic_core import from_json
from safetensors import SafetensorError
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
from glm_grpo.run.tables import Finite, Step, describe_misfit

MANIFEST = "checkpoint.json"
FORMAT_VERSION = 2
_REMEDY = "Resume from another checkpoint, or restore this one from a copy."
_FILE_NAME = re.compile(r"[\w-][\w.-]*\.safetensors")
_OS_ERROR_CODE = re.compile(r"\(os error (\d+)\)")

_logger = logging.getLogger(__name__)


class CheckpointFormatError(CheckpointError):
    """A whole checkpoint, but of another version of glm-grpo."""


class _OptimizerValues(BaseModel):
    """See `optimizer_to_tensors`."""

    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


class StoredRunState(BaseModel):
    """What a run keeps in a checkpoint's metadata, the schema of it; see `RunState`.

    Attributes:
        optimizer: What of its state is no tensor.
        updates: Of the policy, done so far.
    """

    optimizer: _OptimizerValues
    updates: Annotated[int, Strict()] = Field(ge=0, le=2**53)
    best_step: Step | None
    best_total: Finite | None
    skipped_in_a_row: Annotated[int, Strict()] = Field(ge=0, le=2**31 - 1)
    full_decode_from: Step | None
    start_step: Step | None = None


class _File(BaseModel):
    size: Annotated[int, Strict()] = Field(alias="bytes", ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Manifest(BaseModel):
    """The schema of `checkpoint.json`."""

    step: Step
    files: dict[str, _File]
    metadata: dict[str, Any]


class _Sealed(BaseModel):
    """What tells whether a manifest is whole, and of which version."""

    version: Annotated[int, Strict()] = Field(alias="format")
    sha256: str


Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True)
class Checkpoint:
    """What one checkpoint holds.

    Attributes:
        path: Its folder.
        step: Number of training steps done.
        tensors: File stem -> name -> tensor, on the CPU.
        metadata: JSON values: whatever else the run needs to continue.
    """

    path: Path
    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    metadata: Mapping[str, Any]

    def of(self, stem: str) -> Mapping[str, Tensor]:
        """The tensors of one file.

        Raises:
            CheckpointError: There is no such file.
        """
        if stem not in self.tensors:
            raise CheckpointError(
                f"{self.path / MANIFEST} is damaged: files lists no {stem}.safetensors. {_REMEDY}"
            )
        return self.tensors[stem]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Says of which checkpoint it is where something in it does not fit the run.

        Raises:
            CheckpointError: As inside.
        """
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{self.path / MANIFEST}: {error}") from error

    def run_state(self) -> StoredRunState:
        """The metadata of a checkpoint that a run wrote.

        Raises:
            CheckpointError: Something is missing there, or of another type.
        """
        return _checked(StoredRunState, self.metadata, self.path / MANIFEST)


def save_checkpoint(
    folder: RunFolder,
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    metadata: Mapping[str, Any],
) -> Path:
    """Write a checkpoint whole or not at all; one of the same step is replaced.

    Args:
        folder: The run.
        step: Number of training steps done.
        tensors: File stem -> name -> tensor; each stem becomes `<stem>.safetensors`. Tensors that
            share memory are written once each.
        metadata: JSON values, kept in the manifest.

    Returns:
        The checkpoint's folder.

    Raises:
        StorageError: The disk is full, read-only or otherwise refuses; earlier checkpoints stay.
        NonFiniteError: A tensor holds a value that is not finite; earlier checkpoints stay.
    """
    path = folder.checkpoint_dir(step)
    with atomic_directory(path) as temporary:
        files = {}
        for stem, named_tensors in tensors.items():
            file = temporary / f"{stem}.safetensors"
            _save_tensors(file, named_tensors)
            files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256_of_file(file)}
        manifest = {
            "format": FORMAT_VERSION,
            "step": step,
            "files": files,
            # As JSON gives it back, lest a tuple or a number as key change the checksum.
            "metadata": json.loads(json.dumps(dict(metadata))),
        }
        manifest["sha256"] = _sha256_of_manifest(manifest)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    return path


def verify_checkpoint(path: Path) -> None:
    """Verify every byte of a checkpoint, which takes as long as reading it.

    Raises:
        CheckpointError: A file is missing, torn, or not the one that was written; names it.
    """
    for name, expected in _read_manifest(path).files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: {MANIFEST} lists it. {_REMEDY}")
        size = file.stat().st_size
        if size != expected.size:
            raise CheckpointError(
                f"{file} has {size} bytes: {MANIFEST} says {expected.size}. {_REMEDY}"
            )
        if _sha256_of_file(file) != expected.sha256:
            raise CheckpointError(f"{file} is damaged: its SHA-256 differs. {_REMEDY}")


def load_checkpoint(path: Path, *, is_verified: bool = False) -> Checkpoint:
    """Read a checkpoint after verifying every byte of it.

    Args:
        path: Its folder.
        is_verified: Whether `verify_checkpoint` or `newest_checkpoint` was here before, in this
            process or another: nothing is verified again.

    Raises:
        CheckpointError: A file is missing, torn, or not the one that was written, or holds a value
            that is not finite; names the file.
    """
    if not is_verified:
        verify_checkpoint(path)
    manifest = _read_manifest(path)
    try:
        with storage_errors("read", path):
            tensors = {Path(name).stem: load_file(path / name) for name in manifest.files}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} holds a file that is no safetensors file, though {MANIFEST} lists it "
            f"({error}). {_REMEDY}"
        ) from error
    for stem, named_tensors in tensors.items():
        for name, tensor in named_tensors.items():
            if not tensor.isfinite().all():
                raise CheckpointError(
                    f"{path / stem}.safetensors: {name} holds values that are not finite. {_REMEDY}"
                )
    return Checkpoint(path, manifest.step, tensors, manifest.metadata)


def newest_checkpoint(folder: RunFolder, *, before: int | None = None) -> Path | None:
    """The newest checkpoint that is whole; None when there is none.

    A checkpoint that is not whole is passed over with a warning.

    Args:
        folder: The run.
        before: Only those of earlier steps than this; None: all.

    Raises:
        CheckpointError: Another version wrote it: beginning anew would remove what was learned.
    """
    for path in reversed(_checkpoints(folder)):
        if before is not None and (step_of(path) or 0) >= before:
            continue
        try:
            verify_checkpoint(path)
        except CheckpointFormatError:
            raise
        except CheckpointError as error:
            _logger.warning("Passing over a damaged checkpoint. %s", error)
        else:
            return path
    return None


def forget_checkpoints_after(folder: RunFolder, step: int) -> None:
    """Remove the checkpoints of later steps, which a run that goes on from `step` makes anew.

    What a killed process left half written goes, too.

    Raises:
        StorageError: The file system refuses.
    """
    remove_leftovers(folder.checkpoints_dir)
    for path in _checkpoints(folder):
        if (step_of(path) or 0) > step:
            remove(path)


def prune_checkpoints(folder: RunFolder, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints but the newest and the best, and what a killed process left behind.

    Args:
        folder: The run.
        keep: How many of the newest to keep, >= 1.
        best_step: Step of the best checkpoint, kept however old it is; None when unknown.

    Raises:
        ValueError: `keep` is less than 1, which would remove what a resume needs.
        StorageError: The file system refuses.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: at least 1 checkpoint must stay; pass 1 or more")
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
                f"{file.stem}: {name} holds values that are not finite, and is not saved. In a new "
                "run lower optim.learning_rate or optim.max_grad_norm"
            )
        storage = on_cpu.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, as tied weights and slices do.
        separate[name] = on_cpu.clone() if storage in storages else on_cpu
        storages.add(storage)
    try:
        save_file(separate, file)
    except SafetensorError as error:
        # safetensors wraps the system's error, of which only the text keeps the code.
        match = _OS_ERROR_CODE.search(str(error))
        if match is None:
            raise
        raise OSError(int(match.group(1)), str(error)) from error


def _read_manifest(path: Path) -> _Manifest:
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: it marks a whole checkpoint. {_REMEDY}")
    with storage_errors("read", file):
        content = file.read_bytes()
    try:
        values = from_json(content)
    # No JSON, or nested without end.
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}. {_REMEDY}") from error
    seal = _checked(_Sealed, values, file)
    if _sha256_of_manifest({k: v for k, v in values.items() if k != "sha256"}) != seal.sha256:
        raise CheckpointError(f"{file} is damaged: its SHA-256 differs. {_REMEDY}")
    if seal.version != FORMAT_VERSION:
        raise CheckpointFormatError(
            f"{file} has format {seal.version}: this version reads {FORMAT_VERSION}. "
            "Use the version of glm-grpo that wrote it."
        )
    manifest = _checked(_Manifest, values, file)
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{file} lists {name!r}: no safetensors file of this folder. {_REMEDY}"
            )
    if step_of(path) not in (None, manifest.step):
        raise CheckpointError(f"{file} is damaged: step is {manifest.step}. {_REMEDY}")
    return manifest


def _checked(schema: type[Schema], values: object, file: Path) -> Schema:
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(f"{file} is damaged: {describe_misfit(error)}. {_REMEDY}") from error


def _sha256_of_manifest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256_of_file(file: Path) -> str:
    with storage_errors("read", file), file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
