from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.errors import DataError
from glm_grpo.training.data.entries import load_picture, verify_picture
from rewards import pictures

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def saved(picture: Image.Image, path: Path, **options: Any) -> Path:
    picture.save(path, **options)
    return path


def pixel(path: Path, row: int, column: int, height: int = 8, width: int = 8) -> tuple[int, ...]:
    loaded = load_picture(path, "here", height=height, width=width)
    return tuple(loaded[:, row, column].tolist())


def test_load_picture_keeps_pixels_of_the_right_size(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    path = saved(Image.fromarray(values), tmp_path / "a.png")
    loaded = load_picture(path, "here", height=8, width=12)
    assert torch.equal(loaded, torch.from_numpy(values).permute(2, 0, 1))
    assert torch.equal(load_picture(path.read_bytes(), "here", height=8, width=12), loaded)


def test_load_picture_covers_the_size_and_cuts_the_margins_evenly(tmp_path: Path) -> None:
    # Blue margins of 4 left and right of a red square, twice too large: red is left, but for what
    # the filter takes over the cut. Stretching, or cutting on one side, would leave blue columns.
    picture = Image.new("RGB", (24, 16), BLUE)
    picture.paste(RED, (4, 0, 20, 16))
    path = saved(picture, tmp_path / "wide.png")
    loaded = load_picture(path, "here", height=8, width=8)
    assert loaded.shape == (3, 8, 8)
    assert (loaded[0] > 230).all()
    assert (loaded[2] < 25).all()


def test_load_picture_enlarges_a_small_picture(tmp_path: Path) -> None:
    path = saved(Image.new("RGB", (2, 2), RED), tmp_path / "small.png")
    assert load_picture(path, "here", height=32, width=64).shape == (3, 32, 64)


def test_load_picture_lays_transparency_on_white(tmp_path: Path) -> None:
    clear = saved(Image.new("RGBA", (8, 8), (255, 0, 0, 0)), tmp_path / "clear.png")
    half = saved(Image.new("RGBA", (8, 8), (255, 0, 0, 128)), tmp_path / "half.png")
    assert pixel(clear, 3, 3) == WHITE
    assert pixel(half, 3, 3) == (255, 127, 127)
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([255, 0, 0])
    indexed = saved(palette, tmp_path / "palette.png", transparency=0)
    assert pixel(indexed, 3, 3) == WHITE


def test_load_picture_scales_sixteen_bit_grey(tmp_path: Path) -> None:
    # 128 * 257 of 65535 is 128 of 255; cut off instead of scaled it would be 255.
    values = np.full((8, 8), 128 * 257, dtype=np.uint16)
    for name in ("deep.png", "deep.tiff"):
        path = saved(Image.fromarray(values), tmp_path / name)
        assert pixel(path, 0, 0) == (128, 128, 128)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [("L", 77, (77, 77, 77)), ("1", 1, WHITE), ("CMYK", (0, 255, 255, 0), (255, 0, 0))],
)
def test_load_picture_converts_other_modes(
    tmp_path: Path, mode: str, colour: int | tuple[int, ...], expected: tuple[int, ...]
) -> None:
    path = saved(Image.new(mode, (8, 8), colour), tmp_path / "mode.tiff")
    assert pixel(path, 4, 4) == expected


def test_load_picture_applies_the_orientation_of_the_camera(tmp_path: Path) -> None:
    picture = Image.new("RGB", (16, 8), BLUE)
    picture.paste(RED, (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise: what lies left comes to the top
    path = saved(picture, tmp_path / "turned.png", exif=exif)
    assert pixel(path, 0, 4, height=16, width=8) == RED
    assert pixel(path, 15, 4, height=16, width=8) == BLUE


def torn(tmp_path: Path, suffix: str) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = saved(Image.fromarray(noise), tmp_path / f"torn{suffix}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp", ".gif", ".tiff"])
def test_verify_picture_refuses_a_torn_file(tmp_path: Path, suffix: str) -> None:
    path = torn(tmp_path, suffix)
    with pytest.raises(DataError, match=r"list, line 3: picture .*torn.* cannot be used"):
        verify_picture(path, "list, line 3")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, on damaged TIFF tags
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp", ".gif", ".tiff"])
def test_verify_picture_turns_every_failure_of_pillow_into_a_data_error(
    tmp_path: Path, suffix: str
) -> None:
    # Any damaged byte either goes unnoticed or comes out as DataError: nothing else escapes.
    path = saved(Image.new("RGB", (8, 8), RED), tmp_path / f"whole{suffix}")
    content = path.read_bytes()
    refused = 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        try:
            verify_picture(bytes(damaged), "here")
        except DataError:
            refused += 1
    assert refused > 0


def test_verify_picture_refuses_what_is_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "letter.png"
    path.write_text("not a picture")
    with pytest.raises(DataError, match="cannot be used"):
        verify_picture(path, "here")
    with pytest.raises(DataError, match="the embedded picture cannot be used"):
        verify_picture(b"", "here")
    with pytest.raises(DataError, match="cannot be used"):
        verify_picture(tmp_path, "here")


def test_verify_picture_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"here: picture .*gone\.png does not exist"):
        verify_picture(tmp_path / "gone.png", "here")


def test_verify_picture_refuses_formats_that_run_programs(tmp_path: Path) -> None:
    path = saved(Image.new("RGB", (8, 8)), tmp_path / "page.eps")
    with pytest.raises(DataError, match="cannot be used"):
        verify_picture(path, "here")


def test_verify_picture_refuses_floating_point_pixels(tmp_path: Path) -> None:
    path = saved(Image.new("F", (8, 8), 0.5), tmp_path / "float.tiff")
    with pytest.raises(DataError, match="no known range"):
        verify_picture(path, "here")


def test_verify_picture_refuses_a_decompression_bomb(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = saved(Image.new("1", (100, 100)), tmp_path / "bomb.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for limit in (9_999, 4_000):
            monkeypatch.setattr(pictures, "MOST_PIXELS", limit)
            with pytest.raises(DataError, match=f"at most {limit} pixels"):
                verify_picture(path, "here")


def test_real_photographs_load_at_the_size_of_the_rollout(assets_dir: Path) -> None:
    photographs = sorted((assets_dir / "images" / "photos").glob("*.jpg"))
    assert len(photographs) == 8
    for path in photographs:
        loaded = load_picture(path, "here", height=64, width=96)
        assert loaded.shape == (3, 64, 96)
        assert loaded.float().std() > 10
