"""Layout of the run folder, and atomic writes into it.

Every write goes to a temporary name in the same folder, is synced to disk, and is then renamed. A
reader, or a run that resumes after a kill, sees either the old content or the new.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from glm_grpo.errors import ConfigError, StorageError
from rewards.images import ImageError, open_rgb

_IMAGE_FORMATS = ("PNG",)
"""Image formats that a run stores."""

_IMAGES = "images"
_TEMPORARY_SUFFIX = ".tmp"
_LEFTOVER = re.compile(r"\.(.+)\.(?:\d+|earlier)\.tmp")
"""Temporary names of files and folders, see `_temporary_beside`."""
_SAFE_NAME_LENGTH = 64
_HASH_LENGTH = 12
_STEP_NAME = re.compile(r"(?:step|eval)-(\d{6,})")
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_REMEDIES = {
    errno.ENOSPC: "Free some space, then resume the run.",
    errno.EDQUOT: "Free some space, then resume the run.",
    errno.EFBIG: "Choose a file system, or a process limit, that allows larger files.",
    errno.EROFS: "Choose an output folder on a file system that can be written.",
    errno.EACCES: "Choose an output folder you may write to.",
    errno.EPERM: "Choose an output folder you may write to.",
    errno.ENAMETOOLONG: "Choose an output folder with a shorter path.",
    errno.ENOTDIR: "A part of the path is a file: move it or choose another folder.",
}


class _Place:
    """A path in the run folder, as an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunFolder, _: object) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Paths of everything that a run stores. Nothing is created before it is written.

    Attributes:
        path: The run's folder, such as `outputs/<date>/<time>`.
    """

    path: Path

    config_path = _Place("config.yaml")
    """The resolved configuration."""
    origin_path = _Place("origin.json")
    """Digests of prompts, files and code that the run began with, and versions."""
    metrics_path = _Place("metrics.jsonl")
    """Metrics: one JSON object per line, one line per step and one per evaluation."""
    canaries_path = _Place("canaries.json")
    """Bands of the canaries, measured on the base model."""
    tracker_ids_path = _Place("trackers.json")
    """Ids of the run in each tracker."""
    gallery_path = _Place("gallery/index.html")
    """The page that shows samples and scores."""
    table_json_path = _Place("table.json")
    """Scores by group of prompts; only in results of `glm-grpo eval`, as the next."""
    table_markdown_path = _Place("table.md")
    """The same as Markdown."""
    tensorboard_dir = _Place("tensorboard")
    """TensorBoard's event files."""
    rollouts_dir = _Place("rollouts")
    """Tables of rollouts, one per training step."""
    evaluations_dir = _Place("evaluations")
    """Tables of evaluations, one each."""
    evals_dir = _Place("evals")
    """Results of `glm-grpo eval`, a run folder each."""
    images_dir = _Place(_IMAGES)
    """Lossless images: one folder per step and evaluation, one for targets."""
    checkpoints_dir = _Place("checkpoints")
    """Checkpoints, one folder each."""
    failures_dir = _Place("failures")
    """Images that a reward term could not score: one folder per failed step."""
    targets_dir = _Place(f"{_IMAGES}/targets")
    """Target images of the evaluation prompts."""
    train_targets_dir = _Place(f"{_IMAGES}/train-targets")
    """Target images of training prompts, whose ids may equal those of held-out prompts."""
    sources_dir = _Place(f"{_IMAGES}/sources")
    """Source images of the evaluation prompts."""
    train_sources_dir = _Place(f"{_IMAGES}/train-sources")
    """Source images of the training prompts."""

    def image_path(self, stored: str) -> Path:
        """Path of an image, from its entry in the tables."""
        return self.path / stored

    def rollout_path(self, step: int) -> Path:
        """Table of the images sampled, scored and trained on in `step`."""
        return self.path / f"rollouts/step-{step:06d}.parquet"

    def image_dir(self, step: int) -> Path:
        """Images of the rollout of `step`."""
        return self.path / f"{_IMAGES}/step-{step:06d}"

    def evaluation_path(self, step: int) -> Path:
        """Table of the evaluation at policy step `step`."""
        return self.path / f"evaluations/step-{step:06d}.parquet"

    def evaluation_image_dir(self, step: int) -> Path:
        """Images of the evaluation at policy step `step`."""
        return self.path / f"{_IMAGES}/eval-{step:06d}"

    def checkpoint_dir(self, step: int) -> Path:
        """Checkpoint written after `step`."""
        return self.path / f"checkpoints/step-{step:06d}"

    def failure_dir(self, step: int) -> Path:
        """Images of `step` that a reward term could not score."""
        return self.path / f"failures/step-{step:06d}"


def step_of(path: Path) -> int | None:
    """Step in the name of a table, image folder or checkpoint; None for any other name."""
    match = _STEP_NAME.fullmatch(path.name.removesuffix(".parquet"))
    return int(match.group(1)) if match else None


def safe_name(prompt_id: str) -> str:
    """Make a file name from a prompt id of any characters and length.

    Short ids of lower-case letters, digits, `-`, `_` and `.` are kept, unless they begin with a dot
    (which hides a file) or a dash (which programs would read as an option after a shell expands
    `*`). All others are shortened, cleaned and given a hash of the whole id, so that two ids never
    share a file, even on case-insensitive file systems. Ids that already end in such a hash get one
    too; otherwise they could collide with the changed name of another id.
    """
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "_", prompt_id)[:_SAFE_NAME_LENGTH]
    is_hash_like = re.search(rf"-[0-9a-f]{{{_HASH_LENGTH}}}$", cleaned) is not None
    is_unchanged = cleaned == prompt_id == prompt_id.lower()
    if prompt_id and is_unchanged and not prompt_id.startswith((".", "-")) and not is_hash_like:
        return prompt_id
    # Ids read from JSON may contain lone surrogates, which plain UTF-8 refuses.
    digest = hashlib.sha256(prompt_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{cleaned.lstrip('.-') or '_'}-{digest[:_HASH_LENGTH]}"


@contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StorageError` with action, path and remedy."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        code = error.errno or 0
        reason = os.strerror(code) if code else str(error)
        remedy = _REMEDIES.get(code, "Check the path and the disk.")
        raise StorageError(f"Cannot {action} {path}: {reason}. {remedy}") from error


def is_free(path: Path) -> bool:
    """Whether nothing is at this path, or only an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def refuse_taken(path: Path) -> None:
    """Refuse an output folder that would not be a new one."""
    with storage_errors("read", path):
        if not is_free(path):
            raise ConfigError(
                f"{path} is not an empty folder; nothing is overwritten; choose another folder"
            )


def is_read_only(error: StorageError) -> bool:
    """Whether the file system or the folder's permissions forbid writing."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _READ_ONLY


def read_image(path: Path) -> Image.Image:
    """Load an image that a run stored, in RGB."""
    with storage_errors("read", path):
        try:
            return open_rgb(path, formats=_IMAGE_FORMATS)
        except ImageError as error:
            raise StorageError(f"image {path} {error}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically, creating its parent folders."""
    temporary = _temporary_beside(path)
    with storage_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append one line and sync it; a partially written line is removed again."""
    with storage_errors("append to", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            content = memoryview(line.encode() + b"\n")
            try:
                while content:
                    content = content[file.write(content) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Fill a folder atomically; an earlier folder of that name is replaced.

    Yields:
        A temporary folder next to `path`, to be filled. It becomes `path` when the block ends, and
        is removed if the block raises.
    """
    temporary = _temporary_beside(path)
    with storage_errors("write", path):
        try:
            # A killed process may have left one: process ids repeat in containers.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            _sync_tree(temporary)
            _replace_directory(temporary, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file or a folder; a folder disappears at once, not file by file.

    For a symbolic link, only the link is removed.
    """
    with storage_errors("remove", path):
        if path.is_dir() and not path.is_symlink():
            temporary = path.rename(_temporary_beside(path))
            shutil.rmtree(temporary)
        else:
            path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, *, below: bool = False) -> None:
    """Remove what a killed process left half-written in `folder`, recognised by its name.

    A folder that was being replaced, and had already lost its name, gets that name back. Only the
    process that writes the run folder may call this.

    Args:
        folder: Folder to clean up; may be missing.
        below: Whether to clean its subfolders, too.
    """
    pattern = f".*{_TEMPORARY_SUFFIX}"
    for path in sorted(folder.rglob(pattern) if below else folder.glob(pattern)):
        written = leftover_of(path)
        if written is None:
            continue
        replaced = path.with_name(written)
        if path == _earlier_of(replaced) and not replaced.exists():
            with storage_errors("rename", path):
                path.rename(replaced)
        else:
            remove(path)


def leftover_of(path: Path) -> str | None:
    """Final name of one of our temporary files or folders; None for any other path."""
    match = _LEFTOVER.fullmatch(path.name)
    return match[1] if match else None


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY_SUFFIX}")


def _earlier_of(path: Path) -> Path:
    """Where a folder waits while another takes its place; it is still there after a kill."""
    return path.with_name(f".{path.name}.earlier{_TEMPORARY_SUFFIX}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for parent, _, names in os.walk(root):
        for name in names:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _replace_directory(source: Path, destination: Path) -> None:
    if not destination.exists():
        source.rename(destination)
        return
    # A folder cannot be renamed onto one that is not empty, so for an instant neither has the name.
    # After a kill in that instant, `remove_leftovers` restores the earlier one.
    earlier = _earlier_of(destination)
    shutil.rmtree(earlier, ignore_errors=True)
    destination.rename(earlier)
    try:
        source.rename(destination)
    except OSError:
        earlier.rename(destination)
        raise
    shutil.rmtree(earlier)
