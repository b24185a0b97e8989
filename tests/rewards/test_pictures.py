"""Pictures as users have them: shown as they are meant, or refused in words."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, TiffImagePlugin
from torch import Tensor

from rewards.pictures import (
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


def png(width: int, height: int) -> bytes:
    """An RGB PNG that says it is of a size, and has no pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", b"") + chunk(b"IEND", b"")
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
PHOTO = stored(plain("RGB", RED), "JPEG", quality=100, subsampling=0)

# By `cjpeg -optimize -quality 100 -sample 3x1`; Pillow writes no such subsampling.
THREE_TO_ONE = base64.b85decode(
    "|JeWF01!$>Nk#wx0RR9200961|JwjV009930RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI4"
    "0RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40sq?oLjeH+0RaI40RaI40RaI40RaI40RaI40RaI40RaI4"
    "0RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40RaI40RjKO01*fP2mlBJ0Wkmq5di}c"
    "0sq7R6#xMN00000000000000000009|HJ?k5CH%H0000000000000000095Q02KiN0RR910000000000000093jf3a"
    "6cGUc00000000000000000030+5ij#0RRFK0}%i}0E^%$*YN+@"
)

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
    "grey profile, opaque": (stored(plain("LA", (128, 255)), "PNG", icc_profile=LINEAR_GREY), HALF),
    "grey profile of colours": (stored(plain("RGB", GREY), "PNG", icc_profile=LINEAR_GREY), HALF),
    "grey profile, 16 bit": (
        stored(
            Image.fromarray(np.full((8, 8), 128 * 257, np.uint16)), "PNG", icc_profile=LINEAR_GREY
        ),
        HALF,
    ),
    "colour profile of grey": (stored(plain("L", 128), "PNG", icc_profile=ADOBE), GREY),
    "profile": (stored(plain("RGB", RED), "PNG", icc_profile=SRGB), RED),
    "a phone's film behind it": (PHOTO + b"\xff\xda\0\x08" * 300, RED),
    "bytes behind a png": (stored(plain("RGB", RED), "PNG") + b"IDAT", RED),
    "two views": (
        stored(
            plain("RGB", RED), "MPO", save_all=True, append_images=[plain("RGB", BLUE)], quality=100
        ),
        RED,
    ),
    "progressive jpg": (stored(plain("RGB", RED), "JPEG", quality=100, progressive=True), RED),
    "restart markers": (stored(plain("RGB", RED), "JPEG", restart_marker_blocks=1), RED),
    "rare subsampling": (THREE_TO_ONE, RED),
    "unknown JFIF revision": (PHOTO.replace(b"JFIF\0\x01", b"JFIF\0\x02"), RED),
}


@pytest.mark.parametrize("what", SHOWN)
def test_a_picture_is_shown_as_it_is_meant(what: str) -> None:
    content, colour = SHOWN[what]
    shown = np.asarray(open_rgb(content)).astype(int)
    assert shown.shape == (8, 8, 3)
    assert np.abs(shown - np.array(colour)).max() <= 1


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_a_picture_with_a_profile_of_srgb_keeps_every_value(mode: str) -> None:
    picture = Image.fromarray(noise(32, 32, 3).numpy()).convert(mode)
    with_profile = open_rgb(stored(picture, "PNG", icc_profile=SRGB))
    assert with_profile.tobytes() == open_rgb(stored(picture, "PNG")).tobytes()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (stored(plain("RGB", RED), "PNG", icc_profile=b"no profile"), "cannot open profile"),
        (stored(plain("RGB", RED), "PNG", icc_profile=ADOBE[:200]), "cannot open profile"),
        (
            stored(plain("RGB", RED), "PNG", icc_profile=LINEAR_GREY),
            "for pixels of mode L, but these are RGB",
        ),
    ],
    ids=["no profile", "torn", "of another mode"],
)
def test_a_profile_that_cannot_be_used_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(PictureError, match=rf"colour profile cannot be used: .*{reason}.*as sRGB"):
        open_rgb(content)


def test_sixteen_bits_are_rounded_to_eight() -> None:
    # 257 levels of the one are a level of the other.
    deep = Image.fromarray(np.array([[0, 128, 129, 65_535]], np.uint16))
    shown = np.asarray(open_rgb(stored(deep, "PNG")))[..., 0]
    assert shown.tolist() == [[0, 0, 1, 255]]


def test_the_orientation_of_a_camera_is_applied() -> None:
    exif = Image.Exif()
    exif[274] = 6  # the first row is on the right
    picture = plain("RGB", BLUE, (16, 8))
    picture.paste(RED, (0, 0, 8, 4))
    shown = open_rgb(stored(picture, "PNG", exif=exif))
    assert shown.size == (8, 16)
    assert (shown.getpixel((7, 0)), shown.getpixel((0, 0))) == (RED, BLUE)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_torn_picture_is_refused(kind: str) -> None:
    content = stored(Image.fromarray(noise(16, 16, 3).numpy()), kind)
    assert open_rgb(content).size == (16, 16)
    with pytest.raises(PictureError, match="cannot be used .*; give an intact PNG, JPEG,"):
        open_rgb(content[: len(content) // 2])


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"restart_marker_blocks": 8}], ids=str
)
def test_a_jpeg_with_a_hole_is_refused(options: dict[str, Any]) -> None:
    content = stored(Image.fromarray(noise(128, 128, 3).numpy()), "JPEG", **options)
    middle = len(content) // 2
    damaged = content[:middle] + bytes(2048) + content[middle + 2048 :]
    with Image.open(io.BytesIO(damaged)) as picture:
        picture.load()  # Pillow alone takes it
    with pytest.raises(PictureError, match=r"cannot be used \(Corrupt JPEG data.* an intact PNG"):
        open_rgb(damaged)


def test_a_png_with_one_changed_byte_is_refused() -> None:
    content = bytearray(stored(Image.linear_gradient("L").convert("RGB"), "PNG"))
    content[len(content) // 2] ^= 1
    with Image.open(io.BytesIO(content)) as picture:
        picture.load()  # Pillow alone takes it
    with pytest.raises(PictureError, match=r"cannot be used \(broken PNG file .* intact PNG file"):
        decode_png(bytes(content))


@pytest.mark.parametrize(
    "content",
    [b"", b"not a picture", stored(plain("RGB", RED), "EPS")],
    ids=["empty", "text", "a format that runs another program"],
)
def test_what_is_no_picture_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(PictureError, match=r"cannot be used \(not a PNG, .* header is damaged"):
        open_rgb(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="Is a directory"):
        open_rgb(tmp_path)


def test_a_picture_that_is_too_large_is_refused_by_its_header() -> None:
    with pytest.raises(PictureError, match=r"exceeds limit .*; give .* at most 89478485 pixels"):
        open_rgb(png(10_000, 10_000))


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


def tiff(pixels: bytes, **tags: int | tuple[int, ...]) -> bytes:
    """A TIFF of one pixel for each strip."""
    directory = TiffImagePlugin.ImageFileDirectory_v2()
    strip = len(pixels) // (tags["samples"] if tags["planar"] == 2 else 1)
    offsets = tuple(range(8, 8 + len(pixels), strip))
    values = (1, 1, tags["bits"], 1, tags["colours"], tags["samples"], 1, tags["planar"])
    for tag, value in zip((256, 257, 258, 259, 262, 277, 278, 284), values, strict=True):
        directory[tag] = value
    directory[273], directory[279] = offsets, (strip,) * len(offsets)
    start = struct.pack("<2sHL", b"II", 42, 8 + len(pixels)) + pixels
    return start + directory.tobytes(len(start))


def grey_png(depth: int, row: bytes, clear: int) -> bytes:
    """Of one pixel, with the colour that is transparent."""
    header = struct.pack(">IIBBBBB", 1, 1, depth, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"tRNS", struct.pack(">H", clear))
    return b"\x89PNG\r\n\x1a\n" + chunks + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (grey_png(16, b"\0\1\0", 256), "a transparent colour"),
        (grey_png(4, b"\0\xa0", 10), "a transparent colour"),
        (tiff(bytes(6), bits=(16,) * 3, colours=2, samples=3, planar=2), "in separate planes"),
        (tiff(bytes(2), bits=(16,), colours=0, samples=1, planar=1), "0 is white"),
        (tiff(bytes(2), bits=(12,), colours=1, samples=1, planar=1), "12 bits per channel"),
    ],
    ids=["transparent 16 bits", "transparent 4 bits", "planes", "white is 0", "12 bits"],
)
def test_samples_that_would_be_misread_are_refused(content: bytes, reason: str) -> None:
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
        (stored(plain("L", 1), "PNG"), "mode L, not RGB"),
        (stored(plain("RGB", RED), "BMP"), "not a PNG file"),
    ],
)
def test_png_of_another_form_is_refused(content: bytes, found: str) -> None:
    with pytest.raises(PictureError, match=found):
        decode_png(content)
