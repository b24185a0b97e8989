"""A CLIP of random weights, and what open_clip by itself makes of images and captions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import open_clip
import torch
from jaxtyping import Float32, UInt8
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

NAME = "tiny_test_clip"
SIDE = 32
CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": SIDE, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def save(folder: Path) -> None:
    """Config and weights, the same in float32 and, as HPS is published, in float16."""
    config = folder / f"{NAME}.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    open_clip.add_model_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        half = open_clip.create_model(NAME).half().state_dict()
    torch.save({"state_dict": half}, folder / "half.pt")
    whole = {key: part.float() for key, part in half.items()}
    save_file(whole, folder / "weights.safetensors")


def load(folder: Path) -> nn.Module:
    """By open_clip."""
    with torch.random.fork_rng(devices=[]):
        return open_clip.create_model(NAME, str(folder / "weights.safetensors")).eval()


def noise(
    count: int, height: int = 40, width: int = 60, *, seed: int = 7
) -> UInt8[Tensor, "N 3 H W"]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, height, width), generator=generator).to(torch.uint8)


@torch.no_grad()
def embed_images(folder: Path, pixels: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, "N 16"]:
    """Of Pillow images, as open_clip prepares them."""
    transform = image_transform_v2(PreprocessCfg(size=(SIDE, SIDE)), is_train=False)
    images = [transform(Image.fromarray(part.permute(1, 2, 0).numpy())) for part in pixels]
    return load(folder).encode_image(torch.stack(images), normalize=True)


@torch.no_grad()
def embed_captions(folder: Path, captions: Sequence[str]) -> Float32[Tensor, "N 16"]:
    """Each cut to the eight tokens that the model reads."""
    tokens = open_clip.tokenize(list(captions), context_length=8)
    return load(folder).encode_text(tokens, normalize=True)
