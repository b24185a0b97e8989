"""The run folder: where everything of a run lies, and how it is written whole or not at all.

Every write goes to a temporary name beside its destination, is synced to the disk, and is then
renamed. A reader, or a run that resumes after a kill, sees the old content or the new, never half.
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

from glm_grpo.errors import StorageError
from rewards.pictures import PictureError, open_rgb

_PICTURE_FORMATS = ("PNG",)
"""What a run stores."""

_IMAGES = "images"
_TEMPORARY_SUFFIX = ".tmp"
_LEFTOVER = re.compile(r"\.(.+)\.(?:\d+|earlier)\.tmp")
"""How a process that writes here names temporary files and folders, see `_temporary_beside`."""
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


@dataclass(frozen=True)
class RunFolder:
    """Names of all that a run stores. Nothing is created until it is written.

    Attributes:
        path: The run's own folder, `outputs/<date>/<time>`.
    """

    path: Path

    def picture(self, stored: str) -> Path:
        """The path of a picture, by what the tables say of it."""
        return self.path / stored

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """One JSON object a line, one line a step."""
        return self.path / "metrics.jsonl"

    @property
    def canaries_path(self) -> Path:
        """Bands of the canaries, measured on the untrained model."""
        return self.path / "canaries.json"

    @property
    def tracker_ids_path(self) -> Path:
        """What each tracker calls the run."""
        return self.path / "trackers.json"

    @property
    def marks_path(self) -> Path:
        """Stars, rejections and notes of pictures, made in the gallery."""
        return self.path / "marks.json"

    @property
    def gallery_path(self) -> Path:
        """The page that shows samples and scores."""
        return self.path / "gallery/index.html"

    @property
    def rescore_dir(self) -> Path:
        """What other weights would have done, in pictures."""
        return self.path / "rescore"

    @property
    def tensorboard_dir(self) -> Path:
        """Event files of TensorBoard."""
        return self.path / "tensorboard"

    @property
    def rollouts_dir(self) -> Path:
        """One table for each training step."""
        return self.path / "rollouts"

    @property
    def evaluations_dir(self) -> Path:
        """One table for each evaluation."""
        return self.path / "evaluations"

    @property
    def images_dir(self) -> Path:
        """Lossless pictures: a folder for each step and evaluation, one for targets."""
        return self.path / _IMAGES

    @property
    def checkpoints_dir(self) -> Path:
        """One folder for each checkpoint kept."""
        return self.path / "checkpoints"

    @property
    def failures_dir(self) -> Path:
        """Pictures that a reward term could not score: a folder for each step that failed."""
        return self.path / "failures"

    @property
    def targets_dir(self) -> Path:
        """Target pictures of the evaluation prompts."""
        return self.path / f"{_IMAGES}/targets"

    @property
    def train_targets_dir(self) -> Path:
        """Target pictures of the prompts trained on, whose ids may be those of others."""
        return self.path / f"{_IMAGES}/train-targets"

    @property
    def sources_dir(self) -> Path:
        """Source pictures of the evaluation prompts."""
        return self.path / f"{_IMAGES}/sources"

    @property
    def train_sources_dir(self) -> Path:
        """Source pictures of the prompts trained on."""
        return self.path / f"{_IMAGES}/train-sources"

    def rollout_path(self, step: int) -> Path:
        """The table of what was sampled, scored and trained on in `step`."""
        return self.path / f"rollouts/step-{step:06d}.parquet"

    def image_dir(self, step: int) -> Path:
        """The pictures of the rollout of `step`."""
        return self.path / f"{_IMAGES}/step-{step:06d}"

    def evaluation_path(self, step: int) -> Path:
        """The table of the evaluation made at policy step `step`."""
        return self.path / f"evaluations/step-{step:06d}.parquet"

    def evaluation_image_dir(self, step: int) -> Path:
        """The pictures of the evaluation made at policy step `step`."""
        return self.path / f"{_IMAGES}/eval-{step:06d}"

    def checkpoint_dir(self, step: int) -> Path:
        """The checkpoint taken after `step`."""
        return self.path / f"checkpoints/step-{step:06d}"

    def failure_dir(self, step: int) -> Path:
        """The pictures of `step` that a reward term could not score."""
        return self.path / f"failures/step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a table, picture folder or checkpoint; None for any other name."""
    match = _STEP_NAME.fullmatch(path.name.removesuffix(".parquet"))
    return int(match.group(1)) if match else None


def safe_name(prompt_id: str) -> str:
    """A file name for a prompt id that may hold any characters and have any length.

    Short ids of lower-case letters, digits, `-`, `_` and `.` stay as they are, but for those that
    begin with a dot, which hides a file, or a dash, which a shell's `*` would hand to a program as
    an option. All others are shortened, cleaned and given a hash of the whole id, so that two ids
    never share a file, not even on file systems that ignore case. An id that already ends like such
    a hash gets one too, or it could collide with the changed name of another.
    """
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "_", prompt_id)[:_SAFE_NAME_LENGTH]
    is_hash_like = re.search(rf"-[0-9a-f]{{{_HASH_LENGTH}}}$", cleaned) is not None
    is_unchanged = cleaned == prompt_id == prompt_id.lower()
    if prompt_id and is_unchanged and not prompt_id.startswith((".", "-")) and not is_hash_like:
        return prompt_id
    # Ids read from JSON may hold lone surrogates, which plain UTF-8 refuses.
    digest = hashlib.sha256(prompt_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{cleaned.lstrip('.-') or '_'}-{digest[:_HASH_LENGTH]}"


@contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StorageError` that says what, where and the remedy."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        code = error.errno or 0
        reason = os.strerror(code) if code else str(error)
        remedy = _REMEDIES.get(code, "Check the path and the state of the disk.")
        raise StorageError(f"Cannot {action} {path}: {reason}. {remedy}") from error


def is_read_only(error: StorageError) -> bool:
    """Whether the file system, or the owner of the folder, allows no writing there."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _READ_ONLY


def read_picture(path: Path) -> Image.Image:
    """A picture that a run stored, in RGB.

    Raises:
        StorageError: It is missing, damaged or no picture.
    """
    with storage_errors("read", path):
        try:
            return open_rgb(path, formats=_PICTURE_FORMATS)
        except PictureError as error:
            raise StorageError(f"picture {path} {error}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, making its parent folders.

    Raises:
        StorageError: The disk is full, read-only or otherwise refuses; the old content is intact.
    """
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
    """Append one line and sync it; a line that cannot be written whole is taken back.

    Raises:
        StorageError: The disk is full, read-only or otherwise refuses; earlier lines are intact.
    """
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
    """Fill a folder whole or not at all; an earlier folder of that name is replaced.

    Yields:
        A temporary folder beside `path` to be filled. It becomes `path` when the block ends, and
        is removed when the block raises.

    Raises:
        StorageError: The disk is full, read-only or otherwise refuses; the old folder is intact.
    """
    temporary = _temporary_beside(path)
    with storage_errors("write", path):
        try:
            # A killed process may have left one: in containers, process ids repeat.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            _sync_tree(temporary)
            _replace_directory(temporary, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file or a folder; a folder disappears at once, never file by file.

    Of a link, what it leads to stays.

    Raises:
        StorageError: The file system refuses.
    """
    with storage_errors("remove", path):
        if path.is_dir() and not path.is_symlink():
            temporary = path.rename(_temporary_beside(path))
            shutil.rmtree(temporary)
        else:
            path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, *, below: bool = False) -> None:
    """Remove what a killed process left half written in `folder`, known by its name.

    A folder that it was about to replace, and had already taken the name of, gets that name back.
    Only the process that writes the run folder may call this.

    Args:
        folder: May be missing.
        below: Whether to look in the folders in it, too.

    Raises:
        StorageError: The file system refuses.
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
    """The name that a temporary file or folder of ours was to get; None where it is no such."""
    match = _LEFTOVER.fullmatch(path.name)
    return match[1] if match else None


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY_SUFFIX}")


def _earlier_of(path: Path) -> Path:
    """Where a folder is while another takes its place; still there after a kill just then."""
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
    # A folder cannot be renamed onto one that is not empty, so there is an instant in which neither
    # bears the name. After a kill just then, `remove_leftovers` gives it back to the earlier one.
    earlier = _earlier_of(destination)
    shutil.rmtree(earlier, ignore_errors=True)
    destination.rename(earlier)
    try:
        source.rename(destination)
    except OSError:
        earlier.rename(destination)
        raise
    shutil.rmtree(earlier)
