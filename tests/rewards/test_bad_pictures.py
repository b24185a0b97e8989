"""Pictures as they come from strangers: each is refused in words, or shown as it is meant.

Bound: a picture takes at most 16 bytes a pixel of the largest one that is read, which is 1 GiB; one
that is refused by what its header says takes at most 64 MiB.
"""

from __future__ import annotations

import io
import os
import re
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageCms, ImageOps, PngImagePlugin

from glm_grpo.errors import DataError
from glm_grpo.training.data.entries import load_picture
from rewards import pictures
from rewards.pictures import (
    BLOCK,
    FORMATS,
    JPEG_MARKER,
    MOST_PIXELS,
    PNG_MARKER,
    PictureError,
    open_rgb,
)

MEBIBYTE = 2**20
RED, BLUE, WHITE, GREY = (255, 0, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128)
GIVE_A_WHOLE_FILE = f"give a whole {' or '.join(FORMATS)} file with at most {MOST_PIXELS}"

# Pillow's, on what it reads over in a damaged file.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.timeout(30),
]


def stored(picture: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def load(content: bytes, height: int = 8, width: int = 8) -> np.ndarray:
    return load_picture(content, "here", height=height, width=width).numpy()


def noise(mode: str = "RGB", size: int = 16) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def plain(mode: str, colour: Any, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new(mode, size, colour)


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png(width: int, height: int, pixels: bytes = b"", *, more: bytes = b"") -> bytes:
    """A PNG that says it is of a size, whatever pixels follow."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + more
        + chunk(b"IDAT", zlib.compress(pixels))
        + chunk(b"IEND", b"")
    )


def black(width: int, height: int) -> bytes:
    """A whole PNG of one bit a pixel."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    row = b"\0" * (1 + -(-width // 8))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(row * height))
        + chunk(b"IEND", b"")
    )


def jpeg_of_size(width: int, height: int) -> bytes:
    content = bytearray(stored(plain("RGB", RED), "JPEG"))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def bmp_of_size(width: int, height: int) -> bytes:
    content = bytearray(stored(plain("RGB", RED), "BMP"))
    content[18:26] = struct.pack("<ii", width, height)
    return bytes(content)


def gif_of_size(width: int, height: int) -> bytes:
    content = bytearray(stored(plain("P", 0), "GIF"))
    content[6:10] = struct.pack("<HH", width, height)
    return bytes(content)


def gif_with_frame_of_size(width: int, height: int) -> bytes:
    content = bytearray(stored(plain("P", 0), "GIF"))
    frame = content.index(b"\x2c\0\0\0\0\x08\0\x08\0")
    content[frame + 5 : frame + 9] = struct.pack("<HH", width, height)
    return bytes(content)


def tiff_of_size(width: int, height: int) -> bytes:
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    return b"II*\0" + struct.pack("<I", 16) + b"\0" * 8 + directory


def webp_of_size(width: int, height: int) -> bytes:
    bits = (width - 1) | (height - 1) << 14
    data = b"\x2f" + struct.pack("<I", bits) + b"\0" * 11
    body = b"WEBPVP8L" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def with_tags(entries: bytes, count: int, behind: bytes = b"") -> bytes:
    """A directory of tags, in the form of a TIFF and of EXIF."""
    directory = struct.pack("<H", count) + entries + struct.pack("<I", 0)
    return b"II*\0" + struct.pack("<I", 8) + directory + behind


def same_place_again_and_again(size: int) -> bytes:
    """Tags of all the rest of the file, each of which Pillow copies."""
    count = size // 12
    entries = b"".join(struct.pack("<HHII", tag, 7, size, 0) for tag in range(count))
    return with_tags(entries, count)


def tiff_of_strips(count: int, size: int = 64) -> bytes:
    """A picture without compression that has all of its pixels again and again."""
    offsets = 8 + 2 + 12 * 9 + 4
    pixels = offsets + 4 * count
    tags = {256: size, 257: size, 258: 8, 259: 1, 262: 1, 277: 1, 278: size // 2}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    entries.append(struct.pack("<HHII", 273, 4, count, offsets))
    entries.append(struct.pack("<HHII", 279, 4, 1, size * size))
    places = struct.pack("<I", pixels) * count
    return with_tags(b"".join(entries), len(entries), places + b"\0" * size * size)


def apng_of_size(width: int, height: int) -> bytes:
    """One whose background is drawn while it is opened."""
    frame = struct.pack(">IIIIIHHBB", 0, width, height, 0, 0, 1, 1, 1, 0)
    return png(width, height, more=chunk(b"acTL", struct.pack(">II", 2, 0)) + chunk(b"fcTL", frame))


def text(key: str, value: str) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_text(key, value, zip=True)
    return info


def png_of_chunks(*kinds: bytes) -> bytes:
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0),
        b"HUGE": struct.pack(">IIBBBBB", 65_000, 65_000, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(b"\0" * 200),
        b"iCCP": b"a\0\0" + zlib.compress(b"profile"),
        b"IEND": b"",
    }
    named = ((b"IHDR" if kind == b"HUGE" else kind, chunks[kind]) for kind in kinds)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in named)


def palette_without_one() -> bytes:
    header = struct.pack(">IIBBBBB", 8, 8, 8, 3, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 72))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def with_scans(count: int, *, size: int = 512, **options: bool) -> bytes:
    """A JPEG whose last scan stands there again and again."""
    content = stored(plain("L", 100, (size, size)), "JPEG", **options)
    body = content[: -len(b"\xff\xd9")]
    return body + body[body.rindex(b"\xff\xda") :] * count + b"\xff\xd9"


def with_segments(content: bytes, segment: bytes, count: int, marker: int = 0xE2) -> bytes:
    """A JPEG with something of a camera's own, previews as a rule, in front."""
    written = bytes([0xFF, marker]) + struct.pack(">H", len(segment) + 2) + segment
    return content[:2] + written * count + content[2:]


def with_hidden_scans(hiding: bytes, count: int = 500) -> bytes:
    """A JPEG of many scans; the first ends in what could be taken for a segment of all others."""
    content = with_scans(count, size=8)
    second = second_scan(content)
    assert len(content) - second < 0xFFFF
    return content[:second] + hiding + content[second:]


def second_scan(content: bytes) -> int:
    return content.index(b"\xff\xda", content.index(b"\xff\xda") + 2)


WHOLE = {
    "png": stored(noise(), "PNG"),
    "jpg": stored(noise(), "JPEG"),
    "progressive": stored(noise(), "JPEG", progressive=True),
    "webp": stored(noise(), "WEBP"),
    "lossless webp": stored(noise(), "WEBP", lossless=True),
    "gif": stored(noise("P"), "GIF"),
    "bmp": stored(noise(), "BMP"),
    "tiff": stored(noise(), "TIFF"),
    "packed tiff": stored(noise(), "TIFF", compression="tiff_deflate"),
}


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.8])
@pytest.mark.parametrize("kind", WHOLE)
def test_a_torn_picture_is_refused(kind: str, share: float) -> None:
    content = WHOLE[kind]
    with pytest.raises(DataError, match=f"cannot be used .*; {GIVE_A_WHOLE_FILE}"):
        load(content[: int(len(content) * share)])


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"\0" * 1000,
            b"\xff" * 1000,
            b"not a picture",
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        ),
        *(
            b"%PDF-1.7",
            b"GIF89a",
            b"\x89PNG\r\n\x1a\n",
            b"\xff\xd8\xff\xd9",
            b"BM",
            b"II*\0",
            b"PK\x03\x04",
        ),
        *(
            b"RIFF\0\0\0\0WEBP",
            b"RIFF\0\0\0\0AVI LIST",
            b"\0\0\0\x20ftypavif",
            b"8BPS\0\x01",
            b"\x80\x04N.",
        ),
        *(
            stored(noise(), "EPS"),
            stored(noise(), "PPM"),
            stored(noise(), "ICO"),
            stored(noise(), "PDF"),
        ),
        stored(noise(), "PNG")[8:],
    ],
    ids=lambda content: ascii(content[:12]),
)
def test_what_is_no_picture_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    wanted = rf"here: picture .*a\.png cannot be used .*; {GIVE_A_WHOLE_FILE}"
    with pytest.raises(DataError, match=wanted):
        load_picture(path, "here", height=8, width=8)


def broken_sum() -> bytes:
    content = bytearray(WHOLE["png"])
    content[29] ^= 0xFF
    return bytes(content)


DAMAGED = {
    "no palette": palette_without_one(),
    "two headers": png_of_chunks(b"IHDR", b"IHDR", b"IDAT", b"IEND"),
    "a header behind another chunk": png_of_chunks(b"iCCP", b"IHDR", b"IDAT", b"IEND"),
    "no header": png_of_chunks(b"IDAT", b"IEND"),
    "a profile behind the pixels": png_of_chunks(b"IHDR", b"IDAT", b"IDAT", b"iCCP")[:-9],
    "a tag that overflows": with_tags(struct.pack("<HHII", 256, 12, 2**31, 2**31), 1),
    "a width of fractions": with_tags(struct.pack("<HHII", 256, 5, 1, 8), 1, b"\0" * 16),
    "wrong checksum": broken_sum(),
    "no pixels": png(8, 8),
    "a part of a row": png(8, 8, b"\0" * 20),
    "no width": png(0, 8, b"\0" * 200),
    "no height": png(8, 0, b"\0" * 200),
    "a huge chunk": WHOLE["png"][:8] + struct.pack(">I", 0x7FFFFFFF) + WHOLE["png"][12:],
    "a chunk cut off": WHOLE["png"][:-40],
    "a huge unpacked text": png(
        8, 8, b"\0" * 200, more=chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 2**21))
    ),
    "a gif without frames": WHOLE["gif"][:13],
    "a webp of another length": WHOLE["webp"][:40] + b"\0" * 40,
    "a torn tiff directory": tiff_of_size(8, 8)[:60],
    "a tiff that leads nowhere": b"II*\0\xff\xff\xff\x7f",
    "a tiff of fractions": stored(plain("F", 0.5), "TIFF"),
    "values below 0": stored(Image.fromarray(np.full((8, 8), -5, np.int32)), "TIFF"),
    "values above 16 bits": stored(Image.fromarray(np.full((8, 8), 70_000, np.int32)), "TIFF"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_picture_is_refused(what: str) -> None:
    with pytest.raises(DataError, match=f"embedded picture cannot be used .*; {GIVE_A_WHOLE_FILE}"):
        load(DAMAGED[what])


BOMBS = {
    "png, animated": apng_of_size(65_000, 65_000),
    "png, the second header": png_of_chunks(b"IHDR", b"HUGE", b"IDAT", b"IEND"),
    "png, exif": png(8, 8, b"\0" * 200, more=chunk(b"eXIf", same_place_again_and_again(700_000))),
    "png, exif in a text": stored(
        plain("RGB", RED), "PNG", pnginfo=text("Raw profile type exif", "0" * 2**17)
    ),
    "jpg, exif in parts": with_segments(
        stored(plain("RGB", RED), "JPEG"), b"Exif\0\0" + b"\0" * 60_000, 12, marker=0xE1
    ),
    "tiff, tags": same_place_again_and_again(780_000),
    "tiff, strips": tiff_of_strips(500_000),
    "png": png(50_000, 50_000),
    "png, long": black(65_536, 100),
    "png, high": black(1, 65_536),
    "png, the largest there is": png(2**31 - 1, 2**31 - 1),
    "png, a little too large": black(8192, 8193),
    "png, real pixels": png(50_000, 50_000, b"\0" * 10_000_000),
    "jpg": jpeg_of_size(50_000, 50_000),
    "jpg, the largest there is": jpeg_of_size(65_500, 65_500),
    "bmp": bmp_of_size(50_000, 50_000),
    "bmp, upside down": bmp_of_size(50_000, -50_000),
    "gif": gif_of_size(50_000, 50_000),
    "gif, in a frame": gif_with_frame_of_size(50_000, 50_000),
    "tiff": tiff_of_size(50_000, 50_000),
    "webp": webp_of_size(16_384, 16_384),
    "jpg, scans": with_scans(2_000, progressive=True),
    "jpg, scans one after another": with_scans(500),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_is_refused_without_being_unpacked(
    peak_memory: Callable[[Callable[[], object]], int], what: str
) -> None:
    assert len(BOMBS[what]) < 2 * MEBIBYTE

    def refuse() -> None:
        with pytest.raises(DataError, match=f"cannot be used .*; {GIVE_A_WHOLE_FILE}"):
            load(BOMBS[what])

    start = time.process_time()
    assert peak_memory(refuse) < 64 * MEBIBYTE
    assert time.process_time() - start < 30


@pytest.mark.parametrize(
    "hiding",
    [b"", b"\xff\x02\xff\xff", b"\xff\xd0\xff\xff", b"\xff\xfe\0\0", b"\xff" * 2 * MEBIBYTE],
    ids=["nothing", "reserved marker", "restart", "length of nothing", "filling"],
)
def test_scans_that_a_decoder_would_find_are_counted(hiding: bytes) -> None:
    with pytest.raises(DataError, match="more than 200 scans"):
        load(with_hidden_scans(hiding))


@pytest.mark.parametrize("split", range(5))
def test_a_scan_that_lies_across_two_blocks_is_counted(split: int) -> None:
    # 201 scans, one more than is read; the first is filled so that the second begins up to four
    # bytes before the end of a block.
    filling = BLOCK - split - second_scan(with_scans(200, size=8)) + len(JPEG_MARKER)
    with pytest.raises(DataError, match="more than 200 scans"):
        load(with_hidden_scans(b"\0" * filling, 200))
    load(with_hidden_scans(b"\0" * filling, 199))


@pytest.mark.parametrize("start", [b"", WHOLE["webp"], WHOLE["png"][:200], tiff_of_size(8, 8)])
def test_a_file_of_a_terabyte_is_refused_unread(
    tmp_path: Path, peak_memory: Callable[[Callable[[], object]], int], start: bytes
) -> None:
    path = tmp_path / "a.png"
    with path.open("wb") as stream:
        stream.write(start)
        stream.truncate(10**12)  # takes no place on the disk

    def refuse() -> None:
        with pytest.raises(DataError, match="1000000000000 bytes, more than 268435456"):
            load_picture(path, "here", height=8, width=8)

    assert peak_memory(refuse) < 16 * MEBIBYTE


@pytest.mark.parametrize(
    ("mode", "colour", "kind"),
    [("RGBA", (255, 0, 0, 255), "PNG"), ("LA", (9, 255), "PNG"), ("I;16", 99, "PNG")],
)
def test_the_largest_picture_stays_in_bounds(
    peak_memory: Callable[[Callable[[], object]], int], mode: str, colour: Any, kind: str
) -> None:
    # A quarter of the largest, which is in bounds where this is: memory goes with the pixels.
    content = stored(plain(mode, colour, (4096, 4096)), kind, compress_level=1)
    assert peak_memory(lambda: load(content)) < 16 * 4096 * 4096


def oriented(orientation: Any) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    picture = plain("RGB", BLUE, (16, 8))
    picture.paste(RED, (0, 0, 8, 4))
    return stored(picture, "PNG", exif=exif)


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_that_of_pillow(orientation: int) -> None:
    content = oriented(orientation)
    with Image.open(io.BytesIO(content)) as picture:
        upright = np.asarray(ImageOps.exif_transpose(picture)).transpose(2, 0, 1)
    assert np.array_equal(load(content, *upright.shape[1:]), upright)


def test_torn_fields_of_a_camera_do_not_matter() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.ImageDescription] = "a sign in a street"
    content = bytearray(stored(plain("RGB", RED, (16, 8)), "JPEG", exif=exif))
    # The description, type 2 (text), is said to be of type 7 (anything).
    field = content.index(b"\x01\x0e\x00\x02")
    content[field + 3] = 7
    assert load(bytes(content), 16, 8)[0].min() > 250


def animated(kind: str) -> bytes:
    frames = [plain("RGB", colour) for colour in (RED, BLUE, BLUE)]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    return stored(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)


def with_palette(*, is_clear: bool) -> bytes:
    picture = Image.new("P", (8, 8), 0)
    picture.putpalette([*RED, *BLUE])
    return stored(picture, "PNG", **({"transparency": 0} if is_clear else {}))


def with_profile(profile: bytes) -> bytes:
    return stored(plain("RGB", RED), "PNG", icc_profile=profile)


def deep(kind: str) -> bytes:
    return stored(Image.fromarray(np.full((8, 8), 128 * 257, np.uint16)), kind)


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
TEXT = PngImagePlugin.PngInfo()
TEXT.add_text("parameters", "<script>alert(1)</script>")

PHOTO = stored(plain("RGB", RED), "JPEG", quality=100, subsampling=0)
# A film of 16 MiB: 256 of its pairs of bytes, on average, look like scans.
FILM = np.random.default_rng(0).bytes(16 * MEBIBYTE)

SHOWN = {
    "gif, animated": (animated("GIF"), RED),
    "png, animated": (animated("PNG"), RED),
    "webp, animated": (animated("WEBP"), RED),
    "tiff, pages": (animated("TIFF"), RED),
    "cmyk jpg": (stored(plain("CMYK", (0, 0, 0, 127)), "JPEG", quality=100), GREY),
    "cmyk tiff": (stored(plain("CMYK", (0, 255, 255, 0)), "TIFF"), RED),
    "lab tiff": (stored(plain("LAB", (255, 128, 128)), "TIFF"), WHITE),
    "16 bit png": (deep("PNG"), GREY),
    "16 bit tiff": (deep("TIFF"), GREY),
    "32 bit tiff": (stored(Image.fromarray(np.full((8, 8), 128 * 257, np.int32)), "TIFF"), GREY),
    "1 bit png": (stored(plain("1", 1), "PNG"), WHITE),
    "1 bit tiff": (stored(plain("1", 1), "TIFF", compression="group4"), WHITE),
    "grey": (stored(plain("L", 128), "PNG"), GREY),
    "grey, clear": (stored(plain("LA", (0, 0)), "PNG"), WHITE),
    "grey, half clear": (stored(plain("LA", (0, 127)), "PNG"), GREY),
    "colour, clear": (stored(plain("RGBA", (*RED, 0)), "PNG"), WHITE),
    "webp, clear": (stored(plain("RGBA", (*RED, 0)), "WEBP", lossless=True), WHITE),
    "one colour clear": (stored(plain("RGB", RED), "PNG", transparency=RED), WHITE),
    "palette": (with_palette(is_clear=False), RED),
    "palette, clear": (with_palette(is_clear=True), WHITE),
    "gif, clear": (stored(plain("P", 3), "GIF", transparency=3), WHITE),
    "profile": (with_profile(SRGB), RED),
    "torn profile": (with_profile(SRGB[:100]), RED),
    "profile of noise": (with_profile(bytes(range(256)) * 4), RED),
    "text fields": (stored(plain("RGB", RED), "PNG", pnginfo=TEXT), RED),
    "a pixel": (stored(plain("RGB", RED, (1, 1)), "PNG"), RED),
    "a row": (stored(plain("RGB", RED, (5_000, 1)), "PNG"), RED),
    "a column": (stored(plain("RGB", RED, (1, 60_000)), "PNG"), RED),
    "something behind it": (stored(plain("RGB", RED), "PNG") + b"PK\x03\x04" * 100, RED),
    "scans behind it": (PHOTO + FILM, RED),
    "scans in previews": (with_segments(PHOTO, b"\xff\xda\0\x08" * 15_000, 20), RED),
    "few scans": (with_scans(20, progressive=True), (100, 100, 100)),
}


@pytest.mark.parametrize("what", SHOWN)
def test_an_odd_picture_is_shown_as_it_is_meant(what: str) -> None:
    content, colour = SHOWN[what]
    loaded = load(content)
    assert loaded.shape == (3, 8, 8)
    assert np.abs(loaded.astype(int) - np.array(colour)[:, None, None]).max() <= 1


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.txt", "a", "a.png.exe", "ä \n猫.webp"])
@pytest.mark.parametrize("kind", ["PNG", "BMP"])
def test_a_picture_under_any_name_is_shown(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    path.write_bytes(stored(plain("RGB", RED), kind))
    loaded = load_picture(path, "here", height=8, width=8)
    assert loaded[:, 0, 0].tolist() == list(RED)


@pytest.mark.parametrize("place", ["folder", "pipe", "/dev/zero", "/dev/null", "/proc/self/mem"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="here: picture .* cannot be used"):
        load_picture(tmp_path / place, "here", height=8, width=8)


SEEDS = [
    *WHOLE.values(),
    animated("GIF"),
    animated("PNG"),
    animated("WEBP"),
    oriented(6),
    with_profile(SRGB),
    deep("TIFF"),
    stored(noise("CMYK"), "JPEG"),
    stored(noise(), "TIFF", compression="jpeg"),
]
MARKS = [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\xff", b"\0"]


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    seed=st.sampled_from(SEEDS),
    changes=st.lists(
        st.tuples(
            # Headers lie in front: most changes go there.
            st.integers(0, 60) | st.integers(0, 2_000),
            st.sampled_from(MARKS) | st.binary(min_size=1, max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    kept=st.floats(0.5, 1.0) | st.just(1.0),
)
def test_a_changed_picture_is_shown_or_refused(
    seed: bytes, changes: list[tuple[int, bytes, bool]], kept: float
) -> None:
    content = bytearray(seed)
    for place, written, is_added in changes:
        place %= len(content)
        content[place : place + (0 if is_added else len(written))] = written
    try:
        loaded = load(bytes(content[: int(len(content) * kept)]))
    except DataError:
        return
    assert loaded.shape == (3, 8, 8)


SPLITS = {
    PNG_MARKER: rb"(?=....(?:IHDR|PLTE|IDAT|IEND|iCCP|eXIf|acTL|fcTL|fdAT))",
    b"\xff\xd8": rb"(?=\xff[\xc0-\xfe])",
    b"RIFF": rb"(?=VP8[ LX]|ANIM|ANMF)",
    b"II*\0": rb"(?=[\x00-\xff]\x01[\x01-\x0c]\x00)",
    b"": rb"(?=\x2c|\x21)",
}
"""Where the parts of a file begin: chunks, segments, tags."""


def with_right_sums(content: bytearray) -> bytearray:
    """A PNG whose checksums fit what was done to its chunks."""
    place = len(PNG_MARKER)
    while place + 12 <= len(content):
        end = place + 8 + int.from_bytes(content[place : place + 4], "big")
        content[end : end + 4] = struct.pack(">I", zlib.crc32(content[place + 4 : end]))
        place = end + 4
    return content


@pytest.mark.timeout(120)
def test_whatever_is_done_to_a_picture_it_is_refused_or_shown_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, peak_memory: Callable[[Callable[[], object]], int]
) -> None:
    # Smaller than what decoders take by themselves: what a header claims is what would be seen.
    monkeypatch.setattr(pictures, "MOST_PIXELS", 512 * 512)
    outcomes = {"shown": 0, "refused": 0}

    @settings(max_examples=500, deadline=None, derandomize=True, database=None)
    @given(seed=st.sampled_from([*SEEDS, *DAMAGED.values()]), data=st.data())
    def sweep(seed: bytes, data: st.DataObject) -> None:
        pattern = next(SPLITS[mark] for mark in SPLITS if seed.startswith(mark))
        parts = [part for part in re.split(pattern, seed, flags=re.DOTALL) if part]
        places = st.integers(0, len(parts) - 1)
        for change in data.draw(st.lists(st.sampled_from(["swap", "repeat", "drop"]), max_size=2)):
            first, second = data.draw(st.tuples(places, places))
            if change == "swap":
                parts[first], parts[second] = parts[second], parts[first]
            else:
                parts[first] = parts[first] * 2 if change == "repeat" else b""
        content = bytearray(b"".join(parts))
        for place in data.draw(st.lists(st.integers(0, 2_000), max_size=3)):
            if content:
                content[place % len(content)] ^= data.draw(st.integers(1, 255))
        kept = data.draw(st.just(len(content)) | st.integers(0, len(content)))
        if content.startswith(PNG_MARKER) and data.draw(st.booleans()):
            content = with_right_sums(content)
        formats = data.draw(st.sampled_from([FORMATS, ("PNG",)]))
        try:
            open_rgb(bytes(content[:kept]), formats=formats)
        except PictureError:
            outcomes["refused"] += 1
        else:
            outcomes["shown"] += 1

    assert peak_memory(sweep) < 256 * MEBIBYTE
    assert min(outcomes.values()) > 20, outcomes


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(width=st.integers(34, 70_000), height=st.integers(1, 70_000), pixels=st.binary(max_size=100))
def test_a_picture_without_its_pixels_is_refused_whatever_size_it_claims(
    width: int, height: int, pixels: bytes
) -> None:
    # The first row alone has 3 x 34 + 1 = 103 bytes.
    with pytest.raises(DataError, match=GIVE_A_WHOLE_FILE):
        load(png(width, height, pixels))
