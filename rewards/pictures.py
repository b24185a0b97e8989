"""Open picture files, and convert pictures to and from the PNG used in messages."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from jaxtyping import UInt8
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor

PictureSource = Path | bytes
"""A file, or its content if a table or a message embeds it."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Pillow opens more, some by running other programs (EPS), which data files must not trigger."""

DEEP_GREY_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
DEEP_GREY_LARGEST = 65_535

UNSCALED_MODES = ("L;2", "L;4", "RGB;16B")
"""PNG modes for which Pillow scales pixels to 8 bits, but not the transparent colour."""

BITS_PER_SAMPLE, PHOTOMETRIC_INTERPRETATION, PLANAR_CONFIGURATION = 258, 262, 284
WHITE_IS_ZERO, SEPARATE_PLANES = 0, 2
"""TIFF tag values. Source: TIFF 6.0, section 8."""

PROFILE_MODES = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}
"""Pixel mode that a colour profile describes, by the profile's colour space."""

SMALLEST_PART, LARGEST_SCALE = 0.5, 2.0
"""Part of a picture's area, and scale of its sides, beyond which it hardly fits a size."""

_FAST = 1  # zlib level: pictures are read only once, so time matters more than size


class PictureError(ValueError):
    """A file cannot be used as a picture; the message follows its name, with reason and remedy."""


def open_rgb(source: PictureSource, *, formats: Sequence[str] = FORMATS) -> Image.Image:
    """Decode a picture fully.

    Transparency is put on white, EXIF orientation is applied, an embedded colour profile is
    converted to sRGB, 16-bit grey is scaled to 8 bits, an animation gives its first frame. Without
    a profile, values are taken for sRGB: gAMA and cHRM of a PNG are ignored, as Pillow and most
    data pipelines do.

    Damage inside of a file is noticed by the checksums of a PNG and by the warnings of the JPEG
    decoder; the other formats have nothing to compare with.

    Args:
        source: The picture.
        formats: Allowed formats, a subset of `FORMATS`.

    Raises:
        FileNotFoundError: The file does not exist.
        PictureError: It is not a picture, is damaged, too large or of an unknown value range, or
            its colour profile cannot be used.
    """
    with _opened(source, formats) as picture:
        return _to_rgb(ImageOps.exif_transpose(picture))


def to_rgb(picture: Image.Image) -> Image.Image:
    """Convert a picture in memory in the same way as `open_rgb`.

    Raises:
        PictureError: It is truncated or of an unknown value range, or its colour profile cannot be
            used.
    """
    with _refusals(FORMATS):
        _check_depth(picture)
        return _to_rgb(ImageOps.exif_transpose(picture))


def to_pixels(picture: Image.Image) -> UInt8[Tensor, "3 H W"]:
    """Pixel values of an RGB picture."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def fit_pixels(picture: Image.Image, *, height: int, width: int) -> UInt8[Tensor, "3 H W"]:
    """Pixel values of an RGB picture scaled (Lanczos) to cover a size and cropped evenly.

    Nothing is stretched, so that shapes stay comparable; a picture with another aspect ratio loses
    its margins (see `describe_misfit`).
    """
    return to_pixels(ImageOps.fit(picture, (width, height), method=Image.Resampling.LANCZOS))


def describe_misfit(size: tuple[int, int], *, height: int, width: int) -> str:
    """Describe what `fit_pixels` does to a picture that hardly fits; "" if it fits.

    It hardly fits if less than half of it is left, or if its sides are enlarged more than twice.

    Args:
        size: Width and height of the picture, pixels.
        height: Pixels to fit it to.
        width: Pixels to fit it to.
    """
    sides = size[0] * height, size[1] * width
    kept = min(sides) / max(sides)
    enlarged = max(width / size[0], height / size[1])
    parts = [f"{100 * kept:.2g} % of it is left"] if kept < SMALLEST_PART else []
    if enlarged > LARGEST_SCALE:
        parts.append(f"enlarged {enlarged:.3g} times")
    return f"{size[0]} x {size[1]}: {', '.join(parts)}" if parts else ""


def to_bgr_arrays(pixels: UInt8[Tensor, "N 3 H W"]) -> list[UInt8[np.ndarray, "H W 3"]]:
    """Convert pictures to the arrays of OpenCV: height, width, blue-green-red."""
    arrays = pixels.cpu().permute(0, 2, 3, 1).flip(-1).contiguous().numpy()
    return list(arrays)


def encode_png(picture: UInt8[Tensor, "3 H W"]) -> bytes:
    """Encode a picture losslessly as an 8-bit RGB PNG."""
    stream = io.BytesIO()
    array = picture.cpu().permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(array).save(stream, format="PNG", compress_level=_FAST)
    return stream.getvalue()


def decode_png(data: bytes) -> UInt8[Tensor, "3 H W"]:
    """Decode a picture from PNG.

    Raises:
        PictureError: The data is not an intact PNG, too large, or not RGB.
    """
    with _opened(data, ("PNG",)) as picture:
        if picture.mode != "RGB":
            raise ValueError(f"of mode {picture.mode}, not RGB")
        return to_pixels(picture)


@contextmanager
def _opened(source: PictureSource, formats: Sequence[str]) -> Iterator[Image.Image]:
    with _refusals(formats), warnings.catch_warnings():
        # Pillow warns above `Image.MAX_IMAGE_PIXELS`, and refuses only twice as many.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        content = source if isinstance(source, bytes) else source.read_bytes()
        with Image.open(io.BytesIO(content), formats=tuple(formats)) as picture:
            _check_depth(picture)
            picture.load()
            _check_intact(picture.format, content)
            yield picture


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
        raise PictureError(
            f"cannot be used ({reason}); give an intact {kinds} file with at most "
            f"{Image.MAX_IMAGE_PIXELS} pixels"
        ) from error


def _check_intact(kind: str | None, content: bytes) -> None:
    """Refuse damage over which `Image.load` passes."""
    if kind == "PNG":
        # `load` does not read the checksums of the pixels.
        with Image.open(io.BytesIO(content), formats=("PNG",)) as again:
            again.verify()
    if kind in ("JPEG", "MPO"):
        # Pillow drops the warnings of libjpeg.
        try:
            simplejpeg.decode_jpeg(content, "GRAY")
        except ValueError as error:
            # Other complaints are of odd headers, and of subsamplings that only Pillow reads.
            if re.match("Corrupt|Premature", str(error)):
                raise


def _check_depth(picture: Image.Image) -> None:
    """Refuse sample formats that Pillow misinterprets."""
    tags = getattr(picture, "tag_v2", {})
    bits = max(tags.get(BITS_PER_SAMPLE, (8,)))
    is_separate = tags.get(PLANAR_CONFIGURATION) == SEPARATE_PLANES
    if bits == 12 or (bits > 8 and is_separate):
        layout = " in separate planes" if is_separate else ""
        raise ValueError(f"{bits} bits per channel{layout}; save it with 8 bits")
    if bits > 8 and tags.get(PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO:
        raise ValueError(f"{bits} bits of grey where 0 is white; save it with 0 as black")
    raw_modes = [tile[-1] for tile in getattr(picture, "tile", [])]
    if "transparency" in picture.info and (
        picture.mode in DEEP_GREY_MODES or any(mode in UNSCALED_MODES for mode in raw_modes)
    ):
        raise ValueError(
            "a transparent colour, and channels of other than 8 bits; save it with an alpha channel"
        )


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
    """Convert the picture to the mode of its profile.

    Programs keep the profile when they convert between grey and colour.
    """
    if picture.mode not in PROFILE_MODES.values():
        picture = picture.convert("L" if picture.mode == "1" else "RGB")
    if picture.mode == mode:
        return picture
    converted = picture.convert(mode)
    is_lossless = converted.convert(picture.mode).tobytes() == picture.tobytes()
    if "CMYK" in (picture.mode, mode) or not is_lossless:
        raise ValueError(f"it is for pixels of mode {mode}, but these are {picture.mode}")
    return converted


@lru_cache(maxsize=16)
def _find_transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Mode that a profile is for, and the transform to sRGB; None if colours do not change.

    There are many sRGB profiles with different rounding: a profile that changes no colour by more
    than one level counts as sRGB.
    """
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    space = opened.profile.xcolor_space.strip()
    mode = PROFILE_MODES.get(space)
    if mode is None:
        raise ValueError(f"it is for the colour space {space}")
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
    """Scale and round; Pillow's own conversion clips at 255."""
    if values.min() < 0 or values.max() > DEEP_GREY_LARGEST:
        raise ValueError(f"grey values outside 0..{DEEP_GREY_LARGEST}")
    scaled = values.astype(np.uint32)
    scaled += 128
    scaled //= 257
    return scaled.astype(np.uint8)
