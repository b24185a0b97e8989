"""Pictures as users have them: shown as they are meant, or refused in words."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageCms, ImageOps
from torch import Tensor

from rewards.pictures import (
    LARGEST_FILE,
    MOST_PIXELS,
    PictureError,
    decode_png,
    encode_png,
    open_rgb,
)

RED, BLUE, WHITE, GREY = (255, 0, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128)


def stored(picture: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def plain(mode: str, colour: Any, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new(mode, size, colour)


def noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def png(width: int, height: int, pixels: bytes = b"", *, depth: int = 8) -> bytes:
    """An RGB PNG that says it is of a size, whatever pixels follow."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + body


def with_palette(**options: Any) -> bytes:
    picture = Image.new("P", (8, 8), 0)
    picture.putpalette([*RED, *BLUE])
    return stored(picture, "PNG", **options)


def deep(kind: str, value: int, dtype: type) -> bytes:
    return stored(Image.fromarray(np.full((8, 8), value, dtype)), kind)


def animated(kind: str) -> bytes:
    frames = [plain("RGB", colour) for colour in (BLUE, BLUE)]
    return stored(plain("RGB", RED), kind, save_all=True, append_images=frames, duration=50)


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
PHOTO = stored(plain("RGB", RED), "JPEG", quality=100, subsampling=0)

SHOWN = {
    "animated gif": (animated("GIF"), RED),
    "animated png": (animated("PNG"), RED),
    "cmyk jpg": (stored(plain("CMYK", (0, 0, 0, 127)), "JPEG", quality=100), GREY),
    "16 bit png": (deep("PNG", 128 * 257, np.uint16), GREY),
    "16 bit tiff": (deep("TIFF", 128 * 257, np.uint16), GREY),
    "1 bit png": (stored(plain("1", 1), "PNG"), WHITE),
    "grey": (stored(plain("L", 128), "PNG"), GREY),
    "grey, half clear": (stored(plain("LA", (0, 127)), "PNG"), GREY),
    "colour, clear": (stored(plain("RGBA", (*RED, 0)), "PNG"), WHITE),
    "one colour clear": (stored(plain("RGB", RED), "PNG", transparency=RED), WHITE),
    "palette": (with_palette(), RED),
    "palette, clear": (with_palette(transparency=0), WHITE),
    "profile": (stored(plain("RGB", RED), "PNG", icc_profile=SRGB), RED),
    "a phone's film behind it": (PHOTO + b"\xff\xda\0\x08" * 300, RED),
}


@pytest.mark.parametrize("what", SHOWN)
def test_a_picture_is_shown_as_it_is_meant(what: str) -> None:
    content, colour = SHOWN[what]
    shown = np.asarray(open_rgb(content)).astype(int)
    assert shown.shape == (8, 8, 3)
    assert np.abs(shown - np.array(colour)).max() <= 1


def test_sixteen_bits_are_rounded_to_eight() -> None:
    # 257 levels of the one are a level of the other.
    deep = Image.fromarray(np.array([[0, 128, 129, 65_535]], np.uint16))
    shown = np.asarray(open_rgb(stored(deep, "PNG")))[..., 0]
    assert shown.tolist() == [[0, 0, 1, 255]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_that_of_pillow(orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    picture = plain("RGB", BLUE, (16, 8))
    picture.paste(RED, (0, 0, 8, 4))
    content = stored(picture, "PNG", exif=exif)
    with Image.open(io.BytesIO(content)) as opened:
        upright = ImageOps.exif_transpose(opened)
    assert np.array_equal(np.asarray(open_rgb(content)), np.asarray(upright))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_torn_picture_is_refused(kind: str) -> None:
    content = stored(Image.fromarray(noise(16, 16, 3).numpy()), kind)
    assert open_rgb(content).size == (16, 16)
    with pytest.raises(PictureError, match="cannot be used .*; give a whole PNG or JPEG or"):
        open_rgb(content[: len(content) // 2])


@pytest.mark.parametrize(
    "content",
    [b"", b"not a picture", stored(plain("RGB", RED), "EPS")],
    ids=["empty", "text", "a format that runs another program"],
)
def test_what_is_no_picture_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(PictureError, match=r"cannot be used \(no PNG .* damaged header"):
        open_rgb(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="a folder"):
        open_rgb(tmp_path)


@pytest.mark.parametrize(
    ("width", "height"), [(8192, 8193), (65_536, 1), (50_000, 50_000)], ids=str
)
def test_a_picture_that_is_too_large_is_refused_by_its_header(width: int, height: int) -> None:
    with pytest.raises(PictureError, match=f"{width} x {height}, more than {MOST_PIXELS} pixels"):
        open_rgb(png(width, height))


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with path.open("wb") as stream:
        stream.truncate(LARGEST_FILE + 1)  # takes no place on the disk
    with pytest.raises(PictureError, match=f"{LARGEST_FILE + 1} bytes, more than {LARGEST_FILE}"):
        open_rgb(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (deep("TIFF", 70_000, np.int32), "outside 0..65535"),
        (stored(plain("F", 0.5), "TIFF"), "floating-point pixels"),
    ],
)
def test_values_of_an_unknown_range_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(PictureError, match=reason):
        open_rgb(content)


def test_png_keeps_every_value_of_a_picture_and_is_what_others_read() -> None:
    picture = noise(3, 5, 7)
    content = encode_png(picture)
    assert torch.equal(decode_png(content), picture)
    with Image.open(io.BytesIO(content)) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (7, 5))
        assert image.getpixel((6, 0)) == tuple(picture[:, 0, 6].tolist())


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (stored(plain("L", 1), "PNG"), "mode L with 8 bits"),
        (png(1, 1, b"\0" * 7, depth=16), "mode RGB with 16 bits"),
        (stored(plain("RGB", RED), "BMP"), "no PNG file"),
    ],
)
def test_png_of_another_form_is_refused(content: bytes, found: str) -> None:
    with pytest.raises(PictureError, match=found):
        decode_png(content)
