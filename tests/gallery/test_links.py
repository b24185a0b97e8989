"""Links in a run folder: what they lead to outside is not read, served, packed or written."""

from __future__ import annotations

import http.client
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from glm_grpo import cli
from glm_grpo.errors import StorageError
from glm_grpo.gallery import update_gallery, write_gallery
from glm_grpo.gallery.archive import write_archive
from glm_grpo.gallery.server import LOOPBACK, GalleryServer
from glm_grpo.run.folder import RunFolder

OWN = (
    "config.yaml",
    "metrics.jsonl",
    "rollouts",
    "rollouts/step-000001.parquet",
    "evaluations",
    "evaluations/step-000001.parquet",
    "images",
    "gallery",
    "gallery/index.html",
    "gallery/report.html",
    "gallery/assets",
    "gallery/assets/vendor",
    "gallery/assets/app.js",
    "gallery/data",
    "gallery/data/run.js",
    "gallery/thumbs",
    "gallery/thumbs/step-000001",
    "gallery/thumbs/step-000001/kite-0.webp",
)
"""What the gallery of a run stands or falls with."""
PICTURES = ("images/step-000001", "images/step-000001/kite-0.png", "images/train-targets/kite.png")
"""What one step of it shows."""


@pytest.fixture
def shown(run: Any) -> Any:
    """A run of a step and two evaluations, and its gallery."""
    run.record_evaluation(0)
    run.record_step(1)
    run.record_evaluation(1)
    write_gallery(run.folder, ())
    return run


def move_out(folder: RunFolder, name: str) -> Path:
    """Put a part of the run elsewhere and a link in its place, by which all would work."""
    outside = folder.path.parent / "outside"
    outside.mkdir()
    path = folder.path / name
    target = Path(shutil.move(path, outside / path.name))
    path.symlink_to(target)
    return outside


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def run_command(*arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that is refused says."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    assert ended.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("name", OWN)
def test_gallery_refuses_a_link_that_leads_out_and_names_it(
    shown: Any, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outside = move_out(shown.folder, name)
    before = contents(outside)
    said = run_command("gallery", shown.folder.path, "--zip", tmp_path / "x.zip", capsys=capsys)
    assert f"{shown.folder.path / name} is a link that leads out of the run folder" in said
    with pytest.raises(StorageError, match="is a link that leads out of the run folder"):
        write_gallery(shown.folder, ())
    assert contents(outside) == before
    assert not (tmp_path / "x.zip").exists()


@pytest.mark.parametrize("name", PICTURES)
def test_step_whose_pictures_lie_outside_is_said_and_not_shown(shown: Any, name: str) -> None:
    outside = move_out(shown.folder, name)
    shutil.rmtree(shown.gallery)
    write_gallery(shown.folder, ())
    (step,) = shown.data("steps-000001")["steps"]
    assert step == {"step": 1, "problem": step["problem"]}
    assert step["problem"].startswith(f"{name} is a link that leads out of the run folder")
    # The page may be sent: it names no folder of this machine.
    assert str(outside.parent) not in step["problem"]
    assert not [file for file in shown.files("thumbs") if file.startswith("step-000001")]
    assert "groups" in shown.data("evaluation-000001")
    # Nor when the step is added to the gallery that is there.
    update_gallery(shown.folder, 1)
    assert "problem" in shown.data("steps-000001")["steps"][0]


@pytest.mark.parametrize("name", ["images/eval-000001", "images/targets/kite.png"])
def test_before_and_after_shows_no_picture_from_outside(shown: Any, name: str) -> None:
    move_out(shown.folder, name)
    shutil.rmtree(shown.gallery)
    write_gallery(shown.folder, ())
    page = (shown.gallery / "report.html").read_text()
    assert f"{name} is a link that leads out of the run folder" in page
    assert "<img" not in page


@pytest.mark.parametrize("name", ["images", *PICTURES, "gallery", "gallery/data", "images/new.png"])
def test_archive_refuses_a_link_that_leads_out_and_names_it(
    shown: Any, name: str, tmp_path: Path
) -> None:
    (shown.folder.images_dir / "new.png").write_bytes(b"new")
    move_out(shown.folder, name)
    with pytest.raises(StorageError, match=f"{name} is a link that leads out"):
        write_archive(shown.folder, tmp_path / "zips" / "run.zip")
    assert not list(tmp_path.glob("zips/*"))


@contextmanager
def serving(folder: RunFolder) -> Iterator[int]:
    with GalleryServer(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, address: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=10)
    connection.request("GET", address)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("images", "/images/step-000001/kite-0.png"),
        ("images/step-000001", "/images/step-000001/kite-0.png"),
        ("images/step-000001/kite-0.png", "/images/step-000001/kite-0.png"),
        ("gallery", "/gallery/index.html"),
        ("gallery/data", "/gallery/data/run.js"),
    ],
)
def test_server_follows_no_link_that_leads_out_and_names_it(
    shown: Any, name: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(shown.folder) as port:
        assert ask(port, address)[0] == 200
        move_out(shown.folder, name)
        assert ask(port, address)[0] == 404
    assert f"{shown.folder.path / name} is a link that leads out" in caplog.text


def test_open_follows_no_link_that_is_made_after_the_look(
    shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = RunFolder._resolve

    def look_and_swap(folder: RunFolder, name: str) -> tuple[str, str]:
        found = look(folder, name)
        move_out(folder, "images")
        return found

    monkeypatch.setattr(RunFolder, "_resolve", look_and_swap)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        shown.folder.open("images/step-000001/kite-0.png")


def make_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def make_dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.png")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [make_loop, make_dangling, make_pipe])
def test_link_to_nothing_is_a_missing_picture(
    shown: Any, change: Callable[[Path], None], tmp_path: Path
) -> None:
    picture = shown.folder.image_dir(1) / "kite-0.png"
    change(picture)
    shutil.rmtree(shown.gallery)
    write_gallery(shown.folder, ())
    assert "groups" in shown.data("steps-000001")["steps"][0]
    assert "step-000001/kite-0.webp" not in shown.files("thumbs")
    write_archive(shown.folder, tmp_path / "run.zip")
    with zipfile.ZipFile(tmp_path / "run.zip") as archive:
        assert not [name for name in archive.namelist() if "step-000001/kite-0" in name]
    with serving(shown.folder) as port:
        assert ask(port, "/images/step-000001/kite-0.png")[0] == 404


def test_links_that_stay_inside_are_followed(shown: Any, tmp_path: Path) -> None:
    """So is one on the way to the run folder, as where `outputs` lies on another disk."""
    folder = shown.folder.path
    (folder / "images").rename(folder / "pictures")
    (folder / "images").symlink_to("pictures")
    first = folder / "pictures" / "step-000001" / "kite-0.png"
    first.rename(first.with_name("first.png"))
    first.symlink_to(folder / "pictures" / "step-000001" / "first.png")
    disk = tmp_path / "disk"
    disk.mkdir()
    folder.rename(disk / "run")
    # An absolute link that named the run's old place leads to the new one too.
    folder.symlink_to(disk / "run")
    (tmp_path / "outputs").symlink_to(disk)
    run = RunFolder(tmp_path / "outputs" / "run")
    shutil.rmtree(run.path / "gallery")

    cli.main(["gallery", str(run.path), "--zip", str(tmp_path / "run.zip")])

    assert (run.path / "gallery" / "thumbs" / "step-000001" / "kite-0.webp").is_file()
    with zipfile.ZipFile(tmp_path / "run.zip") as archive:
        assert "run/images/step-000001/kite-0.png" in archive.namelist()
    with serving(run) as port:
        assert ask(port, "/images/step-000001/kite-0.png") == (200, first.read_bytes())


def rename_pictures(path: Path, name: str) -> None:
    """Let every row of a stored table name another picture."""
    table = pyarrow.parquet.read_table(path)
    column = pyarrow.array([name] * table.num_rows, pyarrow.string())
    changed = table.set_column(table.column_names.index("image"), "image", column)
    pyarrow.parquet.write_table(changed.replace_schema_metadata(table.schema.metadata), path)


def test_sheet_reads_no_picture_from_outside(
    shown: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "private.png")
    table = shown.folder.evaluation_path(1)
    whole = table.read_bytes()
    sheet = tmp_path / "sheet.png"
    for name in ("../private.png", str(tmp_path / "private.png"), "images/../../private.png"):
        table.write_bytes(whole)
        rename_pictures(table, name)
        said = run_command("gallery", shown.folder.path, "--sheet", sheet, capsys=capsys)
        # Of a long name the beginning is said.
        assert f"picture '{name[:80]}' is not below images/" in said
    table.write_bytes(whole)
    move_out(shown.folder, "images/eval-000001")
    said = run_command("gallery", shown.folder.path, "--sheet", sheet, capsys=capsys)
    assert "images/eval-000001 is a link that leads out of the run folder" in said
    assert not sheet.exists()
