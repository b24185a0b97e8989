"""Images as users have them: shown as they are meant, or refused in words."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms
from torch import Tensor

from rewards.images import (
    ImageError,
    decode_png,
    encode_png,
    open_rgb,
)

RED, BLUE, WHITE, GREY = (255, 0, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128)


def stored(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def plain(mode: str, colour: Any, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new(mode, size, colour)


def noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def png(width: int, height: int) -> bytes:
    """An RGB PNG that says it is of a size, and has no pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + body


def with_palette(**options: Any) -> bytes:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([*RED, *BLUE])
    return stored(image, "PNG", **options)


def animated(kind: str) -> bytes:
    frames = [plain("RGB", colour) for colour in (BLUE, BLUE)]
    return stored(plain("RGB", RED), kind, save_all=True, append_images=frames, duration=50)


def profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """A display profile. Source: ICC.1:2001-04, section 6."""
    place, table, contents = 128 + 4 + 12 * len(tags), struct.pack(">L", len(tags)), b""
    for name, content in tags.items():
        table += struct.pack(">4sLL", name, place + len(contents), len(content))
        contents += content
    head = struct.pack(">L4xL4s4s4s", place + len(contents), 0x02400000, b"mntr", space, b"XYZ ")
    return head.ljust(36, b"\0") + b"acsp".ljust(92, b"\0") + table + contents


def xyz(*values: float) -> bytes:
    return struct.pack(">4s4x3l", b"XYZ ", *(round(value * 65_536) for value in values))


def gamma(value: float) -> bytes:
    return struct.pack(">4s4xLH2x", b"curv", 1, round(value * 256))


def rgb_profile(red: bytes, green: bytes, blue: bytes, curve: bytes) -> bytes:
    primaries = {b"rXYZ": red, b"gXYZ": green, b"bXYZ": blue}
    curves = {b"rTRC": curve, b"gTRC": curve, b"bTRC": curve}
    return profile(b"RGB ", {**primaries, **curves, b"wtpt": xyz(0.9642, 1, 0.8249)})


# Adobe RGB (1998), section 4.3.1.1 and annex C.
ADOBE = rgb_profile(
    xyz(0.60974, 0.31111, 0.01947),
    xyz(0.20528, 0.62567, 0.06087),
    xyz(0.14919, 0.06322, 0.74457),
    gamma(2.2),
)
LINEAR_GREY = profile(b"GRAY", {b"kTRC": gamma(1), b"wtpt": xyz(0.9642, 1, 0.8249)})
# sRGB's red in Adobe RGB; and half of the light, which is level 188 of sRGB.
ADOBE_RED, HALF = (219, 0, 0), (188, 188, 188)

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()

SHOWN = {
    "animated gif": (animated("GIF"), RED),
    "animated png": (animated("PNG"), RED),
    "cmyk jpg": (stored(plain("CMYK", (0, 0, 0, 127)), "JPEG", quality=100), GREY),
    "1 bit png": (stored(plain("1", 1), "PNG"), WHITE),
    "grey": (stored(plain("L", 128), "PNG"), GREY),
    "grey, half clear": (stored(plain("LA", (0, 127)), "PNG"), GREY),
    "colour, clear": (stored(plain("RGBA", (*RED, 0)), "PNG"), WHITE),
    "one colour clear": (stored(plain("RGB", RED), "PNG", transparency=RED), WHITE),
    "palette": (with_palette(), RED),
    "palette, clear": (with_palette(transparency=0), WHITE),
    "adobe rgb": (stored(plain("RGB", ADOBE_RED), "PNG", icc_profile=ADOBE), RED),
    "adobe rgb jpg": (
        stored(plain("RGB", ADOBE_RED), "JPEG", quality=100, subsampling=0, icc_profile=ADOBE),
        RED,
    ),
    "adobe rgb, clear": (stored(plain("RGBA", (9, 9, 9, 0)), "PNG", icc_profile=ADOBE), WHITE),
    "adobe rgb, palette": (
        stored(plain("RGB", ADOBE_RED).quantize(2), "PNG", icc_profile=ADOBE),
        RED,
    ),
    "grey profile": (stored(plain("L", 128), "PNG", icc_profile=LINEAR_GREY), HALF),
    "profile": (stored(plain("RGB", RED), "PNG", icc_profile=SRGB), RED),
    "two views": (
        stored(
            plain("RGB", RED), "MPO", save_all=True, append_images=[plain("RGB", BLUE)], quality=100
        ),
        RED,
    ),
}


@pytest.mark.parametrize("what", SHOWN)
def test_an_image_is_shown_as_it_is_meant(what: str) -> None:
    content, colour = SHOWN[what]
    shown = np.asarray(open_rgb(content)).astype(int)
    assert shown.shape == (8, 8, 3)
    assert np.abs(shown - np.array(colour)).max() <= 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (stored(plain("RGB", RED), "PNG", icc_profile=b"no profile"), "cannot open profile"),
        (stored(plain("RGB", RED), "PNG", icc_profile=ADOBE[:200]), "cannot open profile"),
        (
            stored(plain("RGB", RED), "PNG", icc_profile=LINEAR_GREY),
            "cannot build transform",
        ),
    ],
    ids=["no profile", "torn", "of another mode"],
)
def test_a_profile_that_cannot_be_used_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=rf"colour profile .*{reason}.*sRGB"):
        open_rgb(content)


def test_the_orientation_of_a_camera_is_applied() -> None:
    exif = Image.Exif()
    exif[274] = 6  # the first row is on the right
    image = plain("RGB", BLUE, (16, 8))
    image.paste(RED, (0, 0, 8, 4))
    shown = open_rgb(stored(image, "PNG", exif=exif))
    assert shown.size == (8, 16)
    assert (shown.getpixel((7, 0)), shown.getpixel((0, 0))) == (RED, BLUE)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_torn_image_is_refused(kind: str) -> None:
    content = stored(Image.fromarray(noise(16, 16, 3).numpy()), kind)
    assert open_rgb(content).size == (16, 16)
    with pytest.raises(ImageError, match="PNG, JPEG,"):
        open_rgb(content[: len(content) // 2])


def test_a_png_with_one_changed_byte_is_refused() -> None:
    content = bytearray(stored(Image.linear_gradient("L").convert("RGB"), "PNG"))
    content[len(content) // 2] ^= 1
    with Image.open(io.BytesIO(content)) as image:
        image.load()  # Pillow alone takes it
    with pytest.raises(ImageError, match="broken PNG file"):
        decode_png(bytes(content))


@pytest.mark.parametrize(
    "content",
    [b"", b"not an image", stored(plain("RGB", RED), "EPS")],
    ids=["empty", "text", "a format that runs another program"],
)
def test_what_is_no_image_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(ImageError, match="not a PNG"):
        open_rgb(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="Is a directory"):
        open_rgb(tmp_path)


def test_an_image_that_is_too_large_is_refused_by_its_header() -> None:
    with pytest.raises(ImageError, match="at most 89478485 pixels"):
        open_rgb(png(10_000, 10_000))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_other_than_eight_bits_per_channel_are_refused(dtype: type) -> None:
    # Pillow would cut off what is above 255.
    with pytest.raises(ImageError, match="8 bits per channel"):
        open_rgb(stored(Image.fromarray(np.full((8, 8), 1000, dtype)), "TIFF"))


def test_png_keeps_every_value_of_an_image_and_is_what_others_read() -> None:
    image = noise(3, 5, 7)
    content = encode_png(image)
    assert torch.equal(decode_png(content), image)
    with Image.open(io.BytesIO(content)) as opened:
        assert (opened.format, opened.mode, opened.size) == ("PNG", "RGB", (7, 5))
        assert opened.getpixel((6, 0)) == tuple(image[:, 0, 6].tolist())


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (stored(plain("L", 1), "PNG"), "mode L, not RGB"),
        (stored(plain("RGB", RED), "BMP"), "not a PNG file"),
    ],
)
def test_png_of_another_form_is_refused(content: bytes, found: str) -> None:
    with pytest.raises(ImageError, match=found):
        decode_png(content)
