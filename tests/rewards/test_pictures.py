from __future__ import annotations

import io
import struct
import zlib

import pytest
import torch
from PIL import Image
from torch import Tensor

from rewards.pictures import decode_png, encode_png


def noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind)
    return stream.getvalue()


def png_of_16_bits() -> bytes:
    """One pixel, RGB, 16 bits a channel; Pillow cannot write this."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    pixel = b"\0" + struct.pack(">HHH", 1, 2, 3)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(pixel)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def test_png_keeps_every_value_of_a_picture() -> None:
    picture = noise(3, 5, 7)
    assert torch.equal(decode_png(encode_png(picture)), picture)


def test_png_is_what_others_read() -> None:
    picture = torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None].expand(3, 1, 2)
    with Image.open(io.BytesIO(encode_png(picture))) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (2, 1))
        assert image.getpixel((0, 0)) == (1, 2, 3)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_png_of_another_mode_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"of mode {mode} with . bits a channel, not RGB with 8"):
        decode_png(file_of(Image.new(mode, (1, 1))))


def test_png_with_more_than_8_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="of mode RGB with 16 bits a channel"):
        decode_png(png_of_16_bits())


@pytest.mark.parametrize("data", [b"", b"hello", file_of(Image.new("RGB", (1, 1)), "BMP")])
def test_png_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(
        ValueError,
        match="cannot be used .no PNG file, or one with .*; give a whole",
    ):
        decode_png(data)


def test_png_that_is_cut_is_refused() -> None:
    data = encode_png(noise(3, 9, 9))
    with pytest.raises(ValueError, match="cannot be used .image file is truncated"):
        decode_png(data[: len(data) // 2])
