"""Target pictures: refused when they cannot be used, brought to the size of the rollout."""

from __future__ import annotations

import struct
import warnings
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from glm_grpo.errors import DataError

PictureSource = Path | bytes
"""A file, or the file's content where a table embeds it."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Pillow opens more, some of them by running other programs (EPS): data files may not."""

DEEP_GREY_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
DEEP_GREY_LARGEST = 65_535

DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""What Pillow raises on files that are no pictures, torn (a PNG: SyntaxError) or too large."""


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
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            stream = BytesIO(source) if isinstance(source, bytes) else source
            with Image.open(stream, formats=FORMATS) as picture:
                return _to_rgb(ImageOps.exif_transpose(picture))
    except FileNotFoundError as error:
        raise DataError(
            f"{origin}: picture {source!s} does not exist; paths are relative to the folder of the "
            "file that names them"
        ) from error
    except DECODE_ERRORS as error:
        name = "the embedded picture" if isinstance(source, bytes) else f"picture {source}"
        raise DataError(
            f"{origin}: {name} cannot be used ({error}); give a whole file of one of "
            f"{', '.join(FORMATS)} with at most {Image.MAX_IMAGE_PIXELS} pixels"
        ) from error


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode in DEEP_GREY_MODES:
        # Pillow's own conversion to 8 bits cuts off at 255 instead of scaling.
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() > DEEP_GREY_LARGEST:
            raise ValueError(f"grey values outside 0..{DEEP_GREY_LARGEST}")
        return Image.fromarray(np.rint(values / 257).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if picture.has_transparency_data:
        layered = picture.convert("RGBA")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return picture.convert("RGB")
