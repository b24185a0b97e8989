from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import (
    RunFolder,
    append_line,
    atomic_directory,
    read_image,
    remove,
    remove_leftovers,
    safe_name,
    step_of,
    write_atomically,
)


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """A real failure in the middle of a write: the system cuts files at 1000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("content", [None, b"no image"])
def test_image_that_is_missing_or_damaged_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "0.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StorageError, match=r"0\.png"):
        read_image(path)


def test_run_folder_names_follow_the_documented_layout() -> None:
    folder = RunFolder(Path("run"))
    paths = {
        folder.config_path: "run/config.yaml",
        folder.metrics_path: "run/metrics.jsonl",
        folder.rollout_path(10): "run/rollouts/step-000010.parquet",
        folder.image_dir(10): "run/images/step-000010",
        folder.evaluation_path(10): "run/evaluations/step-000010.parquet",
        folder.evaluation_image_dir(10): "run/images/eval-000010",
        folder.targets_dir: "run/images/targets",
        folder.gallery_path: "run/gallery/index.html",
        folder.checkpoint_dir(10): "run/checkpoints/step-000010",
        folder.tensorboard_dir: "run/tensorboard",
    }
    assert {path.as_posix(): name for path, name in paths.items()} == {
        name: name for name in paths.values()
    }


def test_step_of_reads_back_the_step_of_every_name() -> None:
    folder = RunFolder(Path("run"))
    assert step_of(folder.rollout_path(12)) == 12
    assert step_of(folder.evaluation_image_dir(0)) == 0
    # More than six digits must not be cut.
    assert step_of(folder.checkpoint_dir(1_234_567)) == 1_234_567


@pytest.mark.parametrize("name", ["targets", ".step-000001.9.tmp", "step-1", "step-000001.txt"])
def test_step_of_ignores_other_names(name: str) -> None:
    assert step_of(Path(name)) is None


@pytest.mark.parametrize("prompt_id", ["0", "sign-0012", "a.b_c"])
def test_safe_name_keeps_plain_ids(prompt_id: str) -> None:
    assert safe_name(prompt_id) == prompt_id


@pytest.mark.parametrize("prompt_id", ["", "..", "-rf", "../a/b", "🙂" * 5000, "\ud800"])
def test_safe_name_is_one_harmless_file_name(prompt_id: str, tmp_path: Path) -> None:
    name = safe_name(prompt_id)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}", name)
    (tmp_path / name).write_bytes(b"")
    assert names_in(tmp_path) == [name]


def test_safe_name_never_gives_two_ids_one_name() -> None:
    ids = ["a/b", "a_b", "a:b", "A_b", "a" * 64, "a" * 65, "a" * 66, "", "_", ".a", "a"]
    # An id may even be the changed name of another one.
    ids.append(safe_name("a/b"))
    names = [safe_name(prompt_id).lower() for prompt_id in ids]
    assert len(set(names)) == len(ids)


def test_write_atomically_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, b"one")
    with path.open("rb") as reader:
        write_atomically(path, b"two")
        assert reader.read() == b"one"
    assert path.read_bytes() == b"two"
    assert names_in(path.parent) == ["file"]


@pytest.mark.usefixtures("small_files_only")
def test_write_atomically_keeps_the_old_content_when_the_write_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(StorageError, match=f"{path}: {os.strerror(errno.EFBIG)}"):
        write_atomically(path, b"x" * 1001)
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EROFS, "Choose an output folder"),
    ],
)
def test_write_atomically_says_reason_and_remedy(
    code: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=rf"{tmp_path / 'file'}: {os.strerror(code)}.*{remedy}"):
        write_atomically(tmp_path / "file", b"content")
    assert names_in(tmp_path) == []


def test_append_line_adds_lines_in_order(tmp_path: Path) -> None:
    append_line(tmp_path / "log", "one")
    append_line(tmp_path / "log", "two")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


@pytest.mark.usefixtures("small_files_only")
def test_append_line_takes_back_a_line_that_was_cut(tmp_path: Path) -> None:
    append_line(tmp_path / "log", "one")
    with pytest.raises(StorageError, match=f"log.*{os.strerror(errno.EFBIG)}"):
        append_line(tmp_path / "log", "x" * 1000)
    assert (tmp_path / "log").read_bytes() == b"one\n"


def test_atomic_directory_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "folder"
    with atomic_directory(path) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").write_bytes(b"new")
        assert not path.exists()
    assert (path / "inner" / "file").read_bytes() == b"new"
    assert names_in(path.parent) == ["folder"]


def test_atomic_directory_replaces_all_of_an_earlier_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with atomic_directory(tmp_path / "folder") as temporary:
            (temporary / name).write_bytes(b"")
    assert names_in(tmp_path / "folder") == ["two"]
    assert names_in(tmp_path) == ["folder"]


def test_atomic_directory_keeps_the_old_folder_when_the_block_raises(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "folder") as temporary:
        (temporary / "old").write_bytes(b"")

    def fail() -> None:
        with atomic_directory(tmp_path / "folder") as unfinished:
            (unfinished / "new").write_bytes(b"")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names_in(tmp_path) == ["folder"]
    assert names_in(tmp_path / "folder") == ["old"]


def test_atomic_directory_puts_the_old_folder_back_when_renaming_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    with atomic_directory(path) as temporary:
        (temporary / "old").write_bytes(b"")
    rename, failures = Path.rename, iter([False, True, False])

    def rename_failing_once(source: Path, target: Path) -> Path:
        if next(failures):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", rename_failing_once)
    with pytest.raises(StorageError, match="No space left"), atomic_directory(path) as temporary:
        (temporary / "new").write_bytes(b"")
    assert names_in(tmp_path) == ["folder"]
    assert names_in(path) == ["old"]


def test_atomic_directory_starts_empty_after_a_kill(tmp_path: Path) -> None:
    # What a killed process with the same id, as containers have, left behind.
    leftover = tmp_path / f".folder.{os.getpid()}.tmp"
    leftover.mkdir()
    (leftover / "stale").write_bytes(b"")
    with atomic_directory(tmp_path / "folder") as temporary:
        (temporary / "new").write_bytes(b"")
    assert names_in(tmp_path / "folder") == ["new"]


def test_remove_takes_files_folders_links_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    for name in ("folder", "file", "nothing", "link"):
        remove(tmp_path / name)
    assert names_in(tmp_path) == ["kept"]


def test_remove_leftovers_looks_below_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / ".step-000001.7.tmp").mkdir()
    inner = tmp_path / "tracker" / ".events.7.tmp"
    inner.parent.mkdir()
    inner.touch()
    for other in (".of-its-own.tmp", "notes.7.tmp", ".7.tmp"):
        (inner.parent / other).touch()
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == ["tracker"]
    assert inner.exists()
    remove_leftovers(tmp_path, below=True)
    assert names_in(inner.parent) == [".7.tmp", ".of-its-own.tmp", "notes.7.tmp"]


def test_remove_leftovers_gives_a_folder_back_the_name_that_a_kill_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    with atomic_directory(path) as temporary:
        (temporary / "old").touch()

    class Killed(BaseException):
        """Nothing catches it, and nothing is put back."""

    rename = Path.rename

    def rename_until_killed(source: Path, target: Path) -> Path:
        if target == path:
            raise Killed
        return rename(source, target)

    def replace_and_be_killed() -> None:
        with atomic_directory(path) as temporary:
            (temporary / "new").touch()

    with monkeypatch.context() as killing:
        killing.setattr(Path, "rename", rename_until_killed)
        with pytest.raises(Killed):
            replace_and_be_killed()
    assert not path.exists()

    remove_leftovers(tmp_path)

    assert names_in(tmp_path) == ["folder"]
    assert names_in(path) == ["old"]


def test_remove_leftovers_prefers_what_took_the_place(tmp_path: Path) -> None:
    (tmp_path / ".folder.earlier.tmp").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "new").touch()
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == ["folder"]
    assert names_in(tmp_path / "folder") == ["new"]
