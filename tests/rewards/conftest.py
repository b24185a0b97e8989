"""Images and weights that the reward tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of `tiny_clip`."""
    # Takes seconds to import, and most tests have nothing to do with it.
    from tests.rewards import tiny_clip  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("clip")
    tiny_clip.save(folder)
    return folder


@pytest.fixture(scope="session")
def lpips_images(assets_dir: Path) -> UInt8[Tensor, "3 3 64 64"]:
    """The reference image of the LPIPS authors and its two distortions, p0 and p1."""
    folder = assets_dir / "images" / "lpips"
    names = ("ex_ref.png", "ex_p0.png", "ex_p1.png")
    return torch.stack([to_tensor(Image.open(folder / name).convert("RGB")) for name in names])


def to_tensor(image: Image.Image) -> UInt8[Tensor, "3 H W"]:
    """Channels first."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
