"""Target pictures: refused when they cannot be used, brought to the size of the rollout."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from glm_grpo.errors import DataError
from rewards.pictures import PictureError, PictureSource, open_rgb


def verify_picture(source: PictureSource, origin: str) -> None:
    """Decode a picture fully, as a header alone does not tell a torn file.

    Args:
        source: The picture.
        origin: The file and line that name it, for the error.

    Raises:
        DataError: It is missing, no picture, torn, too large or of an unknown range of values.
    """
    _open(source, origin)


def load_picture(
    source: PictureSource, origin: str, *, height: int, width: int
) -> UInt8[Tensor, "3 H W"]:
    """Load a picture at a size: scaled (Lanczos) to cover it, its overhang cut on both sides.

    Nothing is stretched, so a scorer compares shapes with shapes; a picture of another aspect
    loses its margins. For transparency, orientation and depth see `rewards.pictures.open_rgb`.

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
    fitted = ImageOps.fit(_open(source, origin), (width, height), method=Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()


def _open(source: PictureSource, origin: str) -> Image.Image:
    try:
        return open_rgb(source)
    except FileNotFoundError as error:
        raise DataError(
            f"{origin}: picture {source!s} does not exist; paths are relative to the folder of the "
            "file that names them"
        ) from error
    except PictureError as error:
        name = "the embedded picture" if isinstance(source, bytes) else f"picture {source}"
        raise DataError(f"{origin}: {name} {error}") from error
