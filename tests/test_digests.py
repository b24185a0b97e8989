from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from glm_grpo.digests import digest, digest_files


def test_a_digest_knows_where_contents_end() -> None:
    assert digest(b"ab", b"c") != digest(b"a", b"bc")


@pytest.mark.parametrize(
    ("change", "is_noticed"),
    [
        (lambda folder: (folder / "config.json").write_text("{ }"), True),
        (lambda folder: (folder / "vae/a.safetensors").rename(folder / "vae/b.safetensors"), True),
        (lambda folder: (folder / "linked/weights").write_text("2"), True),
        (lambda folder: (folder / ".cache/etag").write_text("2"), False),
        (lambda folder: (folder / "README.md").write_text("2"), False),
    ],
)
def test_a_digest_of_a_folder_is_of_its_names_and_contents(
    change: Callable[[Path], object], is_noticed: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    for name in ("config.json", "vae/a.safetensors", ".cache/etag"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/weights").write_text("1")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    before = digest_files(folder)
    assert digest_files(shutil.copytree(folder, tmp_path / "copy")) == before
    change(folder)
    assert (digest_files(folder) != before) is is_noticed


def test_a_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm_grpo.digests._LARGEST_WHOLE", 64)
    monkeypatch.setattr("glm_grpo.digests._MIB", 4)
    path = tmp_path / "weights"
    # Pieces of 4 bytes begin at 0, 5, 10, ..., 75, the last at 79 - 4.
    path.write_bytes(bytes(79))
    digests = {digest_files(path)}
    for place in (0, 8, 78):
        content = bytearray(79)
        content[place] = 1
        path.write_bytes(content)
        digests.add(digest_files(path))
    assert len(digests) == 4
    path.write_bytes(bytes(80))
    assert digest_files(path) not in digests
