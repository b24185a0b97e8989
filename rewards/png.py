"""Pictures as PNG files, which keep every value."""

from __future__ import annotations

import io

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

_FAST = 1  # of zlib's levels: pictures are read once, and time counts more than size
_DEPTH_BYTE = 24  # after signature, chunk length, IHDR, width and height


def encode_png(picture: UInt8[Tensor, "3 H W"]) -> bytes:
    """A picture as an 8-bit RGB PNG, without loss."""
    stream = io.BytesIO()
    array = picture.cpu().permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(array).save(stream, format="PNG", compress_level=_FAST)
    return stream.getvalue()


def decode_png(data: bytes) -> UInt8[Tensor, "3 H W"]:
    """Read a picture.

    Raises:
        ValueError: It is no whole PNG, or not an RGB one with 8 bits a channel.
    """
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            mode, array = image.mode, np.array(image)
    # Pillow reports a damaged file in each of these ways, and one that would fill the memory.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
    # Pillow calls 16 bits a channel RGB too, and drops the lower ones.
    depth = data[_DEPTH_BYTE]
    if (mode, depth) != ("RGB", 8):
        raise ValueError(f"it is of mode {mode} with {depth} bits a channel, not RGB with 8")
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()
