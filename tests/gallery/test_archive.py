from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.errors import StorageError
from glm_grpo.gallery import write_gallery
from glm_grpo.gallery.archive import write_archive
from glm_grpo.run.folder import RunFolder


@pytest.fixture
def written(run: Any) -> Any:
    """A run with a step and its gallery."""
    run.record_step(1)
    run.folder.checkpoint_dir(1).mkdir(parents=True)
    (run.folder.checkpoint_dir(1) / "policy.safetensors").write_bytes(b"weights")
    write_gallery(run.folder, ())
    return run


def test_write_archive_packs_gallery_and_pictures_in_a_folder_of_the_runs_name(
    written: Any, tmp_path: Path
) -> None:
    write_archive(written.folder, tmp_path / "new" / "run.zip")
    root = written.folder.path
    expected = {
        f"run/{path.relative_to(root).as_posix()}": path.read_bytes()
        for part in ("gallery", "images")
        for path in (root / part).rglob("*")
        if path.is_file()
    }
    with zipfile.ZipFile(tmp_path / "new" / "run.zip") as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == expected
        assert "run/gallery/index.html" in expected
        for entry in archive.infolist():
            is_picture = entry.filename.endswith((".png", ".webp"))
            stored = entry.compress_type == zipfile.ZIP_STORED
            assert stored == is_picture, entry.filename


def test_write_archive_packs_no_half_written_file_and_not_itself(written: Any) -> None:
    path = written.gallery / "run.zip"
    (written.gallery / "data" / ".run.js.7.tmp").write_text("half")
    (written.folder.images_dir / ".step-000002.7.tmp").mkdir()
    (written.folder.images_dir / ".step-000002.7.tmp" / "x.png").write_text("half")
    for _ in range(2):
        write_archive(written.folder, path)
        with zipfile.ZipFile(path) as archive:
            assert not [name for name in archive.namelist() if "tmp" in name or "zip" in name]


def test_write_archive_is_whole_or_not_at_all(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "zips" / "run.zip"
    write_archive(written.folder, path)
    before = path.read_bytes()

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=r"Cannot write .*run\.zip: No space left on device"):
        write_archive(written.folder, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_write_archive_packs_no_file_of_elsewhere(written: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (written.folder.images_dir / "link.png").symlink_to(tmp_path / "secret.png")
    write_archive(written.folder, tmp_path / "run.zip")
    with zipfile.ZipFile(tmp_path / "run.zip") as archive:
        assert "run/images/link.png" not in archive.namelist()


def test_write_archive_follows_a_link_to_the_run(written: Any, tmp_path: Path) -> None:
    """As where `outputs` lies on another disk."""
    (tmp_path / "outputs").symlink_to(written.folder.path.parent)
    write_archive(RunFolder(tmp_path / "outputs" / "run"), tmp_path / "run.zip")
    with zipfile.ZipFile(tmp_path / "run.zip") as archive:
        assert "run/images/step-000001/kite-0.png" in archive.namelist()
