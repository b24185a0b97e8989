"""Images of a prompts file, brought to the size of the rollout; how files are decoded is tested
in tests/rewards/test_images.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.data.entries import load_image, verify_image
from glm_grpo.errors import DataError

RED, BLUE = (255, 0, 0), (0, 0, 255)


def saved(image: Image.Image, path: Path) -> Path:
    image.save(path)
    return path


def test_load_image_keeps_pixels_of_the_right_size(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    path = saved(Image.fromarray(values), tmp_path / "a.png")
    loaded = load_image(path, "here", height=8, width=12)
    assert torch.equal(loaded, torch.from_numpy(values).permute(2, 0, 1))
    assert torch.equal(load_image(path.read_bytes(), "here", height=8, width=12), loaded)


def test_load_image_covers_the_size_and_cuts_the_margins_evenly(tmp_path: Path) -> None:
    # Blue margins of 4 left and right of a red square, twice too large: red is left, but for what
    # the filter takes over the cut. Stretching, or cutting on one side, would leave blue columns.
    image = Image.new("RGB", (24, 16), BLUE)
    image.paste(RED, (4, 0, 20, 16))
    path = saved(image, tmp_path / "wide.png")
    loaded = load_image(path, "here", height=8, width=8)
    assert loaded.shape == (3, 8, 8)
    assert (loaded[0] > 230).all()
    assert (loaded[2] < 25).all()


def test_load_image_enlarges_a_small_image(tmp_path: Path) -> None:
    path = saved(Image.new("RGB", (2, 2), RED), tmp_path / "small.png")
    assert load_image(path, "here", height=32, width=64).shape == (3, 32, 64)


def test_verify_image_refuses_a_torn_file_by_place_and_name(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = saved(Image.fromarray(noise), tmp_path / "torn.png")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"list, line 3: .*torn\.png"):
        verify_image(path, "list, line 3")


def test_verify_image_refuses_a_missing_file_and_an_embedded_one_that_is_empty(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match=r"here: .*gone\.png"):
        verify_image(tmp_path / "gone.png", "here")
    with pytest.raises(DataError, match="here: .*embedded"):
        verify_image(b"", "here")
