from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from glm_grpo.run.folder import RunFolder
from glm_grpo.studio.gallery.thumbnails import make_thumbnails, thumbnail_name


def store(folder: RunFolder, image: str, width: int, height: int, *, seed: int = 0) -> Path:
    """An image of noise, which no lossy format keeps."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path = folder.images_dir / image
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def thumbnail(folder: RunFolder, image: str) -> Path:
    return folder.gallery_path.parent / "thumbs" / thumbnail_name(image)


def test_thumbnail_name_keeps_the_points_in_a_name() -> None:
    assert thumbnail_name("step-000010/a.b.c-0.png") == "step-000010/a.b.c-0.webp"


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1024, 1024), (384, 384)),
        ((1024, 512), (384, 192)),
        # Kept whole, and never enlarged.
        ((300, 200), (300, 200)),
        ((64, 32), (64, 32)),
    ],
)
def test_make_thumbnails_limits_the_longer_side(
    size: tuple[int, int], expected: tuple[int, int], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    store(folder, "step-000001/x-0.png", *size)
    make_thumbnails(folder, ["step-000001/x-0.png"])
    with Image.open(thumbnail(folder, "step-000001/x-0.png")) as image:
        assert (image.format, image.size) == ("WEBP", expected)


@pytest.mark.parametrize(("width", "is_lossless"), [(256, True), (257, False)])
def test_make_thumbnails_keeps_small_images_without_loss(
    width: int, is_lossless: bool, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    source = store(folder, "targets/x.png", width, 32)
    make_thumbnails(folder, ["targets/x.png"])
    shown = np.asarray(Image.open(thumbnail(folder, "targets/x.png")).convert("RGB"))
    assert np.array_equal(shown, np.asarray(Image.open(source))) == is_lossless


def test_make_thumbnails_makes_again_only_what_is_older_than_its_image(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = ["step-000001/a-0.png", "step-000001/b-0.png"]
    sources = [store(folder, name, 32, 32) for name in names]
    make_thumbnails(folder, names)
    before = [thumbnail(folder, name).stat() for name in names]
    store(folder, names[0], 32, 32, seed=1)
    later = before[0].st_mtime_ns + 1
    os.utime(sources[0], ns=(later, later))
    make_thumbnails(folder, names)
    after = [thumbnail(folder, name).stat() for name in names]
    # A file that is replaced has another number.
    assert after[0].st_ino != before[0].st_ino
    assert after[1].st_ino == before[1].st_ino
    shown = np.asarray(Image.open(thumbnail(folder, names[0])).convert("RGB"))
    assert np.array_equal(shown, np.asarray(Image.open(sources[0])))


def test_make_thumbnails_leaves_out_missing_and_damaged_images(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    whole = store(folder, "step-000001/whole.png", 64, 64).read_bytes()
    names = ["step-000001/missing.png", "step-000001/whole.png"]
    for size in (0, len(whole) // 2):
        names.append(f"step-000001/torn-{size}.png")
        (folder.images_dir / names[-1]).write_bytes(whole[:size])
    make_thumbnails(folder, names)
    made = sorted(path.name for path in (tmp_path / "gallery/thumbs/step-000001").iterdir())
    assert made == ["whole.webp"]


def test_make_thumbnails_keeps_that_of_an_image_that_is_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store(folder, "step-000001/x-0.png", 32, 32).with_name("x-0.png")
    make_thumbnails(folder, ["step-000001/x-0.png"])
    (folder.images_dir / "step-000001/x-0.png").unlink()
    make_thumbnails(folder, ["step-000001/x-0.png"])
    assert thumbnail(folder, "step-000001/x-0.png").is_file()
