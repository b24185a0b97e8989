"""Open image files, and convert images to and from the PNG used in messages."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor

ImageSource = Path | bytes
"""A file, or its content if a table or a message embeds it."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Pillow opens more, some by running other programs (EPS), which data files must not trigger."""

_SMALLEST_PART, _LARGEST_SCALE = 0.5, 2.0
"""Part of an image's area, and scale of its sides, beyond which it hardly fits a size."""

_FAST = 1  # zlib level: images are read only once, so time matters more than size


class ImageError(ValueError):
    """A file cannot be used as an image; the message follows its name, with reason and remedy."""


def open_rgb(source: ImageSource | Image.Image, *, formats: Sequence[str] = FORMATS) -> Image.Image:
    """Decode an image fully, and convert it to RGB as it is shown.

    Transparency is put on white, EXIF orientation is applied, an embedded colour profile is
    converted to sRGB, an animation gives its first frame. Without a profile, values are taken for
    sRGB: gAMA and cHRM of a PNG are ignored, as Pillow and most data pipelines do.

    Damage inside of a file is noticed by the checksums of a PNG and the ends of other formats;
    a JPEG may be damaged in the middle and still be read.

    Args:
        formats: Allowed formats, a subset of `FORMATS`.

    Raises:
        FileNotFoundError: The file does not exist.
        ImageError: It is not an image, is damaged, too large, or has other than 8 bits per
            channel; or its colour profile cannot be used.
    """
    with _opened(source, formats) as image:
        return _to_rgb(ImageOps.exif_transpose(image))


def to_pixels(image: Image.Image) -> UInt8[Tensor, "3 H W"]:
    """Pixel values of an RGB image."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def to_pil(pixels: UInt8[Tensor, "3 H W"]) -> Image.Image:
    """RGB image of pixel values, from any device."""
    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


def fit_pixels(image: Image.Image, *, height: int, width: int) -> UInt8[Tensor, "3 H W"]:
    """Pixel values of an RGB image scaled (Lanczos) to cover a size and cropped evenly.

    Nothing is stretched, so that shapes stay comparable; an image with another aspect ratio loses
    its margins (see `describe_misfit`).
    """
    return to_pixels(ImageOps.fit(image, (width, height), method=Image.Resampling.LANCZOS))


def describe_misfit(size: tuple[int, int], *, height: int, width: int) -> str:
    """Describe what `fit_pixels` does to an image that hardly fits; "" if it fits.

    It hardly fits if less than half of it is left, or if its sides are enlarged more than twice.
    """
    sides = size[0] * height, size[1] * width
    kept = min(sides) / max(sides)
    enlarged = max(width / size[0], height / size[1])
    parts = [f"{100 * kept:.2g} % of it is left"] if kept < _SMALLEST_PART else []
    if enlarged > _LARGEST_SCALE:
        parts.append(f"enlarged {enlarged:.3g} times")
    return f"{size[0]} x {size[1]}: {', '.join(parts)}" if parts else ""


def to_bgr_arrays(pixels: UInt8[Tensor, "N 3 H W"]) -> list[UInt8[np.ndarray, "H W 3"]]:
    """Convert images to the arrays of OpenCV: height, width, blue-green-red."""
    arrays = pixels.cpu().permute(0, 2, 3, 1).flip(-1).contiguous().numpy()
    return list(arrays)


def encode_png(pixels: UInt8[Tensor, "3 H W"]) -> bytes:
    """Encode an image losslessly as an 8-bit RGB PNG."""
    stream = io.BytesIO()
    to_pil(pixels).save(stream, format="PNG", compress_level=_FAST)
    return stream.getvalue()


def decode_png(data: bytes) -> UInt8[Tensor, "3 H W"]:
    """Decode an image from PNG.

    Raises:
        ImageError: The data is not an intact PNG, too large, or not RGB.
    """
    with _opened(data, ("PNG",)) as image:
        if image.mode != "RGB":
            raise ValueError(f"of mode {image.mode}, not RGB")
        return to_pixels(image)


@contextmanager
def _opened(source: ImageSource | Image.Image, formats: Sequence[str]) -> Iterator[Image.Image]:
    with _refusals(formats), warnings.catch_warnings():
        if isinstance(source, Image.Image):
            yield source
            return
        # Pillow warns above `Image.MAX_IMAGE_PIXELS`, and refuses only twice as many.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        content = source if isinstance(source, bytes) else source.read_bytes()
        with Image.open(io.BytesIO(content), formats=tuple(formats)) as image:
            image.load()
            if image.format == "PNG":
                # `load` does not read the checksums of the pixels.
                with Image.open(io.BytesIO(content), formats=("PNG",)) as again:
                    again.verify()
            yield image


@contextmanager
def _refusals(formats: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    # Not by class, because decoders raise whatever a wrong byte leads to: AssertionError,
    # MemoryError, struct.error and a dozen more.
    except Exception as error:
        reason: object = str(error) or type(error).__name__
        *others, last = formats
        kinds = f"{', '.join(others)} or {last}" if others else last
        if isinstance(error, UnidentifiedImageError):
            reason = f"not a {kinds} file, or its header is damaged"
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise ImageError(
            f"cannot be used ({reason}); give an intact {kinds} file with at most "
            f"{Image.MAX_IMAGE_PIXELS} pixels"
        ) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode[0] in "IF":
        raise ValueError(f"pixels of mode {image.mode}; save it with 8 bits per channel")
    if not image.has_transparency_data:
        return _to_srgb(image)
    layered = image.convert("RGBA")
    white = Image.new("RGB", layered.size, "white")
    white.paste(_to_srgb(layered.convert("RGB")), mask=layered.getchannel("A"))
    return white


def _to_srgb(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if not profile:
        return image.convert("RGB")
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        # Programs keep the profile when they convert colour to grey.
        if opened.profile.xcolor_space.strip() == "RGB":
            image = image.convert("RGB")
        srgb = ImageCms.createProfile("sRGB")
        return ImageCms.buildTransform(opened, srgb, image.mode, "RGB").apply(image)
    except (OSError, ImageCms.PyCMSError) as error:
        raise ValueError(
            f"its colour profile cannot be used: {error}; save it as sRGB or without a profile"
        ) from error
