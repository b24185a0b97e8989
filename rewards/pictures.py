"""Pictures: the one place that opens a file as one, and their form in messages, PNG.

Decoders trust what a file says of itself. So sizes are counted before a decoder takes memory for
them, and whatever a decoder raises is a `PictureError`.
"""

from __future__ import annotations

import io
import re
import stat
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor

PictureSource = Path | bytes
"""A file, or the file's content where a table or a message embeds it."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Pillow opens more, some of them by running other programs (EPS): data files may not."""

MOST_PIXELS = 8192 * 8192
"""A file of a few kilobytes can claim any number. At 16 bytes a pixel, which is what its decoding
takes at most, a picture needs no more than 1 GiB."""

LONGEST_SIDE = 65_535
LARGEST_FILE = 256 * 2**20
"""Bytes. More than the largest picture has without compression; some decoders read files whole."""

MOST_SCANS = 200
"""A progressive JPEG has about ten scans. One of a megabyte can have ten thousands, each of which
goes over all pixels."""

JPEG_MARKER = b"\xff\xd8"
SCAN_MARKER = b"\xda"
EXIF_MARKER, EXIF_START = b"\xe1", b"Exif\0\0"
JPEG_SEGMENT = re.compile(rb"\xff(?:\xd9|([\xc0-\xcf\xda-\xfe])(..))", re.DOTALL)
"""The end of the image, or a marker with the length of what it heads. Other markers head nothing,
or are passed over by decoders. Source: ITU-T T.81, annex B."""

BLOCK = 2**20
"""Bytes that are searched at a time."""

PNG_MARKER = b"\x89PNG\r\n\x1a\n"
TIFF_MARKERS = (b"II", b"MM")
MOST_EXIF_BYTES = 2**16
MOST_TAGS = 2**16
TEXT_TAGS = (1, 2, 7)
"""Types of TIFF tags that stay bytes; numbers of other types become objects."""

MOST_STRIPS = 2**17
MOST_LAYERS = 8
"""How often the strips of a TIFF may cover its pixels: each channel can have strips of its own."""

DEEP_GREY_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
DEEP_GREY_LARGEST = 65_535

UNSCALED_MODES = ("L;2", "L;4", "RGB;16B")
"""Of a PNG: Pillow scales its pixels to 8 bits, and not the colour that is transparent."""

BITS_PER_SAMPLE, PHOTOMETRIC_INTERPRETATION, PLANAR_CONFIGURATION = 258, 262, 284
WHITE_IS_ZERO, SEPARATE_PLANES = 0, 2
"""Tags of a TIFF and values of them. Source: TIFF 6.0, section 8."""

PROFILE_MODES = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}
"""By the colour space of a profile: the mode of the pixels that it describes."""

UPRIGHT_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By the orientation that a camera writes: where the first row and column of the file lie."""

_FAST = 1  # of zlib's levels: pictures are read once, and time counts more than size
_DEPTH_BYTE = 24  # after signature, chunk length, IHDR, width and height


class PictureError(ValueError):
    """A file cannot be used as a picture; says why and what to give, to be put after its name."""


def open_rgb(source: PictureSource, *, formats: Sequence[str] = FORMATS) -> Image.Image:
    """Decode a picture fully.

    Transparency lies on white, EXIF orientation is applied, an embedded colour profile is converted
    to sRGB, 16-bit grey is scaled to 8 bits, an animation gives its first frame.

    Args:
        source: The picture.
        formats: What it may be, of `FORMATS`.

    Raises:
        FileNotFoundError: There is no such file.
        PictureError: It is no picture, torn, too large, of an unknown range of values, or its
            colour profile cannot be used.
    """
    with _opened(source, formats) as picture:
        return _to_rgb(_turn_upright(picture))


def to_rgb(picture: Image.Image) -> Image.Image:
    """A picture in memory as `open_rgb` gives that of a file.

    Raises:
        PictureError: It is torn, of an unknown range of values, or its colour profile cannot be
            used.
    """
    with _refusals(FORMATS):
        _check_depth(picture)
        return _to_rgb(_turn_upright(picture))


def to_pixels(picture: Image.Image) -> UInt8[Tensor, "3 H W"]:
    """The values of an RGB picture."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def fit_pixels(picture: Image.Image, *, height: int, width: int) -> UInt8[Tensor, "3 H W"]:
    """The values of an RGB picture scaled (Lanczos) to cover a size, its overhang cut evenly.

    Nothing is stretched, so a scorer compares shapes with shapes; a picture of another aspect
    loses its margins.
    """
    return to_pixels(ImageOps.fit(picture, (width, height), method=Image.Resampling.LANCZOS))


def encode_png(picture: UInt8[Tensor, "3 H W"]) -> bytes:
    """A picture as an 8-bit RGB PNG, without loss."""
    stream = io.BytesIO()
    array = picture.cpu().permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(array).save(stream, format="PNG", compress_level=_FAST)
    return stream.getvalue()


def decode_png(data: bytes) -> UInt8[Tensor, "3 H W"]:
    """Read a picture.

    Raises:
        PictureError: It is no whole PNG, too large, or not an RGB one with 8 bits a channel.
    """
    with _opened(data, ("PNG",)) as picture:
        # Pillow calls 16 bits a channel RGB too, and drops the lower ones.
        depth = data[_DEPTH_BYTE]
        if (picture.mode, depth) != ("RGB", 8):
            raise ValueError(
                f"of mode {picture.mode} with {depth} bits a channel, not RGB with 8 bits"
            )
        return to_pixels(picture)


@contextmanager
def _opened(source: PictureSource, formats: Sequence[str]) -> Iterator[Image.Image]:
    with _refusals(formats), warnings.catch_warnings(), _open_file(source) as file:
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        _check_header(file)
        file.seek(0)
        with Image.open(file, formats=tuple(formats)) as picture:
            _check_size(*picture.size)
            _check_work(picture)
            _check_depth(picture)
            picture.load()
            yield picture


@contextmanager
def _refusals(formats: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    # Not by their names: decoders raise whatever a wrong byte led them to, AssertionError,
    # MemoryError, struct.error and a dozen more.
    except Exception as error:
        reason: object = str(error) or type(error).__name__
        kinds = " or ".join(formats)
        if isinstance(error, UnidentifiedImageError):
            reason = f"no {kinds} file, or one with a damaged header"
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise PictureError(
            f"cannot be used ({reason}); give a whole {kinds} file with at most {MOST_PIXELS} "
            "pixels"
        ) from error


def _open_file(source: PictureSource) -> io.BytesIO | io.BufferedReader:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    status = source.stat()
    # A pipe would be waited for, without an end.
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("a folder, a pipe or a device")
    if status.st_size > LARGEST_FILE:
        raise ValueError(f"{status.st_size} bytes, more than {LARGEST_FILE}")
    return source.open("rb")


def _check_header(file: io.BufferedIOBase) -> None:
    """Refuse what Pillow would take memory for while it opens a file."""
    start = file.read(len(PNG_MARKER))
    if start == PNG_MARKER:
        size = _read_png_size(file)
        if size is not None:
            _check_size(*size)
    elif start.startswith(JPEG_MARKER):
        file.seek(len(JPEG_MARKER))
        _check_segments(file)
    elif start.startswith(TIFF_MARKERS):
        _check_tags(file)


def _read_png_size(file: io.BufferedIOBase) -> tuple[int, int] | None:
    """Width and height before the pixels; None where the file ends earlier.

    Pillow lets a second header stand, and draws the background of an animation as it opens it.
    """
    size = None
    file.seek(len(PNG_MARKER))
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if (kind == b"IHDR") != (size is None):
            raise ValueError("its header is not the first chunk, or stands there twice")
        if size is None:
            numbers = file.read(8)
            if len(numbers) < 8:
                return None
            width, height = struct.unpack(">II", numbers)
            size, length = (width, height), length - 8
        if kind == b"IDAT":
            break
        file.seek(length + 4, io.SEEK_CUR)
    return size


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS or max(width, height) > LONGEST_SIDE:
        raise ValueError(
            f"{width} x {height}, more than {MOST_PIXELS} pixels or longer than {LONGEST_SIDE}"
        )


def _check_work(picture: Image.Image) -> None:
    """Refuse what would take far more memory or time than the pixels do."""
    # A directory of EXIF may say of each of its fields that it is all the rest.
    for key in ("exif", "Raw profile type exif"):
        if len(picture.info.get(key, b"")) > MOST_EXIF_BYTES:
            raise ValueError(f"more than {MOST_EXIF_BYTES} bytes of EXIF")
    strips = getattr(picture, "tile", [])
    areas = (max(0, x1 - x0) * max(0, y1 - y0) for _, (x0, y0, x1, y1), *_ in strips)
    most = MOST_LAYERS * picture.width * picture.height
    if len(strips) > MOST_STRIPS or sum(areas) > most:
        raise ValueError(f"{len(strips)} strips, more than its pixels need")


def _check_depth(picture: Image.Image) -> None:
    """Refuse samples that Pillow reads otherwise than the file means them."""
    tags = getattr(picture, "tag_v2", {})
    bits = max(tags.get(BITS_PER_SAMPLE, (8,)))
    is_separate = tags.get(PLANAR_CONFIGURATION) == SEPARATE_PLANES
    if bits == 12 or (bits > 8 and is_separate):
        layout = " in separate planes" if is_separate else ""
        raise ValueError(f"{bits} bits a channel{layout}; save it with 8 bits")
    if bits > 8 and tags.get(PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO:
        raise ValueError(f"{bits} bits of grey where 0 is white; save it with 0 as black")
    raw_modes = [tile[-1] for tile in getattr(picture, "tile", [])]
    if "transparency" in picture.info and (
        picture.mode in DEEP_GREY_MODES or any(mode in UNSCALED_MODES for mode in raw_modes)
    ):
        raise ValueError(
            "a transparent colour where channels have not 8 bits; save it with an alpha channel"
        )


def _check_segments(file: io.BufferedIOBase) -> None:
    """Count the scans of a JPEG behind its first marker, as far as they matter, and its EXIF.

    What stands behind the end of the image (phones put films there) and inside other segments
    (previews) is not counted. Pillow joins several EXIF segments to a long one.
    """
    scans, exifs, place, data = 0, 0, 0, b""
    while block := file.read(BLOCK):
        data, place = data[place:] + block, max(0, place - len(data))
        # The last bytes may be a marker whose length and first bytes come with the next block.
        known = len(data) - len(EXIF_START) if len(block) == BLOCK else len(data)
        while (found := JPEG_SEGMENT.search(data, place)) and found.end() <= known:
            if found[1] is None:
                return
            scans += found[1] == SCAN_MARKER
            exifs += found[1] == EXIF_MARKER and data.startswith(EXIF_START, found.end())
            if scans > MOST_SCANS:
                raise ValueError(f"more than {MOST_SCANS} scans")
            if exifs > 1:
                raise ValueError("more than one EXIF segment")
            # Its length counts itself, and may lie.
            place = found.start(2) + max(2, int.from_bytes(found[2], "big"))
        place = max(place, found.start() if found else len(data) - 3)


def _check_tags(file: io.BufferedIOBase) -> None:
    """Refuse a TIFF by the tags of its first picture.

    They may all lead to one place, and Pillow makes a copy of it for each, and an object of each
    number. Source: TIFF 6.0, section 2, and BigTIFF.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    start = file.read(16)
    order = "<" if start.startswith(b"II") else ">"
    is_big = start[2:3] == b"+"  # 43
    number, entry = (f"{order}Q", f"{order}HHQ8x") if is_big else (f"{order}H", f"{order}HHL4x")
    try:
        (place,) = struct.unpack_from(f"{order}Q" if is_big else f"{order}4xL", start, 8 * is_big)
        file.seek(place)
        (count,) = struct.unpack(number, file.read(struct.calcsize(number)))
        if count > MOST_TAGS:
            raise ValueError(f"{count} tags, more than {MOST_TAGS}")
        claimed = 0
        for tag, kind, values in struct.iter_unpack(
            entry, file.read(count * struct.calcsize(entry))
        ):
            is_text = kind in TEXT_TAGS
            claimed += values if is_text else 8 * values
            if (values > MOST_STRIPS and not is_text) or claimed > 4 * size + BLOCK:
                raise ValueError(f"tag {tag} has {values} values, more than a picture needs")
    except struct.error as error:
        raise ValueError("its directory of tags is torn") from error


def _turn_upright(picture: Image.Image) -> Image.Image:
    """As `ImageOps.exif_transpose`, which also writes the other fields, torn ones too, once more.

    Source: EXIF 2.32, tag 0x0112.
    """
    orientation = picture.getexif().get(ExifTags.Base.Orientation, 1)
    turn = UPRIGHT_TURNS.get(orientation)
    return picture if turn is None else picture.transpose(turn)


def _to_rgb(picture: Image.Image) -> Image.Image:
    profile = picture.info.get("icc_profile")
    if picture.mode in DEEP_GREY_MODES:
        return _to_srgb(Image.fromarray(_to_eight_bits(np.asarray(picture))), profile)
    if picture.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    opacity = None
    if picture.has_transparency_data:
        layered = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        opacity = layered.getchannel("A")
        picture = layered.convert("L" if picture.mode in ("L", "LA") else "RGB")
    colours = _to_srgb(picture, profile)
    if opacity is None:
        return colours
    white = Image.new("RGB", colours.size, "white")
    white.paste(colours, mask=opacity)
    return white


def _to_srgb(picture: Image.Image, profile: bytes | None) -> Image.Image:
    if not profile:
        return picture.convert("RGB")
    try:
        mode, transform = _find_transform(profile)
        picture = _for_profile(picture, mode)
    except (OSError, ValueError, ImageCms.PyCMSError) as error:
        raise ValueError(
            f"its colour profile cannot be used: {error}; save it as sRGB or without a profile"
        ) from error
    return picture.convert("RGB") if transform is None else transform.apply(picture)


def _for_profile(picture: Image.Image, mode: str) -> Image.Image:
    """The picture in the mode of its profile.

    Programs keep the profile when they turn grey into colours or colours into grey.
    """
    if picture.mode not in PROFILE_MODES.values():
        picture = picture.convert("L" if picture.mode == "1" else "RGB")
    if picture.mode == mode:
        return picture
    converted = picture.convert(mode)
    is_lossless = converted.convert(picture.mode).tobytes() == picture.tobytes()
    if "CMYK" in (picture.mode, mode) or not is_lossless:
        raise ValueError(f"it is for pixels of mode {mode}, these are {picture.mode}")
    return converted


@lru_cache(maxsize=16)
def _find_transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """The mode that a profile is for, and the way to sRGB; None where colours stay as they are.

    Profiles of sRGB are many and round differently: one that changes no colour by more than a
    level is one of them.
    """
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    space = opened.profile.xcolor_space.strip()
    mode = PROFILE_MODES.get(space)
    if mode is None:
        raise ValueError(f"it is for colours of the space {space}")
    transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB")
    if mode == "CMYK":
        return mode, transform
    levels = np.arange(256, dtype=np.uint8)
    steps = levels[::15]
    cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(1, -1, 3)
    sample = Image.fromarray(levels[None] if mode == "L" else cube)
    before, after = sample.convert("RGB"), transform.apply(sample)
    change = np.abs(np.asarray(after, dtype=int) - np.asarray(before, dtype=int)).max()
    return mode, transform if change > 1 else None


def _to_eight_bits(values: np.ndarray) -> np.ndarray:
    """Scale and round; Pillow's own conversion cuts off at 255."""
    if values.min() < 0 or values.max() > DEEP_GREY_LARGEST:
        raise ValueError(f"grey values outside 0..{DEEP_GREY_LARGEST}")
    scaled = values.astype(np.uint32)
    scaled += 128
    scaled //= 257
    return scaled.astype(np.uint8)
