"""Target pictures: refused when they cannot be used, brought to the size of the rollout."""

from __future__ import annotations

import re
import stat
import struct
import warnings
import zlib
from io import BufferedReader, BytesIO
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from glm_grpo.errors import DataError

PictureSource = Path | bytes
"""A file, or the file's content where a table embeds it."""

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
JPEG_SEGMENT = re.compile(rb"\xff(?:\xd9|([\xc0-\xcf\xda-\xfe])(..))", re.DOTALL)
"""The end of the image, or a marker with the length of what it heads. Other markers head nothing,
or are passed over by decoders. Source: ITU-T T.81, annex B."""

BLOCK = 2**20
"""Bytes that are looked through at a time."""

DEEP_GREY_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
DEEP_GREY_LARGEST = 65_535

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

DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""What Pillow raises on files that are no pictures, torn (a PNG: SyntaxError), too large or with
fields of a wrong type (a TIFF: TypeError)."""


def verify_picture(source: PictureSource, origin: str) -> None:
    """Decode a picture fully, as a header alone does not tell a torn file.

    Args:
        source: The picture.
        origin: The file and line that name it, for the error.

    Raises:
        DataError: It is missing, no picture, torn, too large or of an unknown range of values.
    """
    _open_rgb(source, origin)


def load_picture(
    source: PictureSource, origin: str, *, height: int, width: int
) -> UInt8[Tensor, "3 H W"]:
    """Load a picture at a size: scaled (Lanczos) to cover it, its overhang cut on both sides.

    Nothing is stretched, so a scorer compares shapes with shapes; a picture of another aspect
    loses its margins. Transparency lies on white, EXIF orientation is applied, 16-bit grey is
    scaled to 8 bits, an animation gives its first frame.

    Args:
        source: The picture.
        origin: The file and line that name it, for the error.
        height: Pixels.
        width: Pixels.

    Returns:
        RGB, 0..255.

    Raises:
        DataError: As `verify_picture`.
    """
    picture = _open_rgb(source, origin)
    fitted = ImageOps.fit(picture, (width, height), method=Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()


def _open_rgb(source: PictureSource, origin: str) -> Image.Image:
    try:
        with warnings.catch_warnings(), _open_stream(source) as stream:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(stream, formats=FORMATS) as picture:
                _check_claims(picture, stream)
                return _to_rgb(_turn_upright(picture))
    except FileNotFoundError as error:
        raise DataError(
            f"{origin}: picture {source!s} does not exist; paths are relative to the folder of the "
            "file that names them"
        ) from error
    except DECODE_ERRORS as error:
        name = "the embedded picture" if isinstance(source, bytes) else f"picture {source}"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(
            f"{origin}: {name} cannot be used ({reason}); give a whole file of one of "
            f"{', '.join(FORMATS)} with at most {MOST_PIXELS} pixels"
        ) from error


def _open_stream(source: PictureSource) -> BytesIO | BufferedReader:
    if isinstance(source, bytes):
        return BytesIO(source)
    status = source.stat()
    # A pipe would be waited for, without an end.
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("a folder, a pipe or a device")
    if status.st_size > LARGEST_FILE:
        raise ValueError(f"{status.st_size} bytes, more than {LARGEST_FILE}")
    return source.open("rb")


def _check_claims(picture: Image.Image, stream: BytesIO | BufferedReader) -> None:
    """Refuse by what the header says, before anything is decoded."""
    width, height = picture.size
    if width * height > MOST_PIXELS or max(width, height) > LONGEST_SIDE:
        raise ValueError(
            f"{width} x {height}, more than {MOST_PIXELS} pixels or longer than {LONGEST_SIDE}"
        )
    position = stream.tell()
    stream.seek(0)
    scans = _count_scans(stream) if stream.read(len(JPEG_MARKER)) == JPEG_MARKER else 0
    stream.seek(position)
    if scans > MOST_SCANS:
        raise ValueError(f"more than {MOST_SCANS} scans")


def _count_scans(stream: BytesIO | BufferedReader) -> int:
    """Of a JPEG behind its first marker, as far as it matters.

    What stands behind the end of the image (phones put films there) and inside other segments
    (previews) is not counted.
    """
    count, place, data = 0, 0, b""
    while block := stream.read(BLOCK):
        data, place = data[place:] + block, max(0, place - len(data))
        while found := JPEG_SEGMENT.search(data, place):
            count += found[1] == SCAN_MARKER
            if found[1] is None or count > MOST_SCANS:
                return count
            # Its length counts itself, and may lie.
            place = found.start(2) + max(2, int.from_bytes(found[2], "big"))
        # The last bytes may be a marker whose length comes with the next block.
        place = max(place, len(data) - 3)
    return count


def _turn_upright(picture: Image.Image) -> Image.Image:
    """As `ImageOps.exif_transpose`, which also writes the other fields, torn ones too, once more.

    Source: EXIF 2.32, tag 0x0112.
    """
    orientation = picture.getexif().get(ExifTags.Base.Orientation, 1)
    turn = UPRIGHT_TURNS.get(orientation)
    return picture if turn is None else picture.transpose(turn)


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode in DEEP_GREY_MODES:
        return Image.fromarray(_to_eight_bits(np.asarray(picture))).convert("RGB")
    if picture.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if picture.has_transparency_data:
        layered = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        white = Image.new("RGB", layered.size, "white")
        white.paste(layered, mask=layered)
        return white
    return picture.convert("RGB")


def _to_eight_bits(values: np.ndarray) -> np.ndarray:
    """Scale and round; Pillow's own conversion cuts off at 255."""
    if values.min() < 0 or values.max() > DEEP_GREY_LARGEST:
        raise ValueError(f"grey values outside 0..{DEEP_GREY_LARGEST}")
    scaled = values.astype(np.uint32)
    scaled += 128
    scaled //= 257
    return scaled.astype(np.uint8)
