"""Stage `quality`: train a small CLIP with a linear quality head, for the aesthetic term.

The CLIP learns which caption belongs to which image. The head, on its normalised image embedding
like LAION's heads, learns how degraded an image is: from 10 for clean ones down to 1.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64
from open_clip import CLIP
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.v2.functional import gaussian_blur

from glm_grpo.tiny import world
from tools.tiny.stage import Schedule, train_stage

_BATCH = 32
_STEPS = 1000
_END = 258
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
"""Std of OpenAI CLIP, which is open_clip's default."""


def clip_config() -> dict[str, object]:
    """The open_clip model config that ships with the weights; text is bytes."""
    return {
        "embed_dim": 64,
        "vision_cfg": {
            "image_size": world.SIZE,
            # A residual network, because degradation is local: convolutions learn it at once, while
            # a transformer of this size takes thousands of steps.
            "layers": [1, 1, 1, 1],
            "width": 16,
            "head_width": 32,
        },
        "text_cfg": {
            "context_length": 80,
            "vocab_size": _END + 1,
            "width": 64,
            "heads": 2,
            "layers": 1,
        },
    }


def build_clip(*, seed: int) -> CLIP:
    """Build the stock open_clip class with fresh weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLIP(**clip_config())


def build_head(*, seed: int) -> nn.Linear:
    """Build a fresh quality head on the normalised embedding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Linear(64, 1)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(seed))
        # The mean quality from `degrade`: three in four images have 10 - 9 / 2 on average.
        head.bias.fill_(0.75 * 5.5 + 0.25 * 10)
    return head


def train_quality(clip: CLIP, head: nn.Linear, *, folder: Path, seed: int) -> None:
    """Train the CLIP and the quality head in place."""

    def loss_at(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        signs = [world.random_sign(rng) for _ in range(_BATCH)]
        clean = torch.stack([world.draw_sign(sign) for sign in signs]).float() / 255
        degraded, quality = degrade(clean, rng, generator)
        embeddings = functional.normalize(clip.encode_image(_normalised(degraded)), dim=-1)
        texts = torch.stack([byte_tokens(world.caption(sign)) for sign in signs])
        captions = functional.normalize(clip.encode_text(texts), dim=-1)
        logits = clip.logit_scale.exp().clamp(max=50) * embeddings @ captions.T
        labels = torch.arange(_BATCH)
        by_image = functional.cross_entropy(logits, labels)
        by_caption = functional.cross_entropy(logits.T, labels)
        contrast = 0.5 * (by_image + by_caption)
        return 0.1 * contrast + functional.mse_loss(head(embeddings).squeeze(-1), quality)

    train_stage(
        "quality",
        (clip, head),
        loss_at,
        schedule=Schedule(steps=_STEPS, learning_rate=1e-3),
        folder=folder,
        seed=seed,
    )


def degrade(
    clean: Float32[Tensor, "B 3 H W"], rng: np.random.Generator, generator: torch.Generator
) -> tuple[Float32[Tensor, "B 3 H W"], Float32[Tensor, " B"]]:
    """Degrade images, each in one way and with its own severity; returns their quality as well.

    One image in four stays clean (10); quality falls linearly with the severity, down to 1.
    """
    severity = torch.from_numpy(rng.random(len(clean))).float()
    severity[::4] = 0.0
    images = []
    for index, image in enumerate(clean):
        amount = severity[index].item()
        kind = rng.integers(4)
        if amount == 0.0:
            images.append(image)
        elif kind == 0:
            images.append(gaussian_blur(image, [21, 21], [0.3 + 4 * amount] * 2))
        elif kind == 1:
            noise = torch.randn(image.shape, generator=generator)
            images.append((image + 0.35 * amount * noise).clamp(0, 1))
        elif kind == 2:
            # Blend two images, like a decoder that cannot decide.
            other = clean[(index + 1) % len(clean)]
            images.append(torch.lerp(image, other, 0.5 * amount))
        else:
            images.append(_shuffle_patches(image, amount, rng))
    return torch.stack(images), 10 - 9 * severity


def byte_tokens(text: str) -> Int64[Tensor, "80"]:
    """UTF-8 bytes between a start and an end token, whose id is the largest, as CLIP requires."""
    ids = [_END - 1, *text.encode()[:78], _END]
    return torch.tensor(ids + [0] * (80 - len(ids)))


def save_quality(clip: CLIP, head: nn.Linear, folder: Path) -> None:
    """Write config.json (in open_clip's form), model.safetensors in fp16 and head.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(clip_config(), indent=2) + "\n")
    weights = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in clip.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors")
    save_file(head.state_dict(), folder / "head.safetensors")


def _normalised(pixels: Float32[Tensor, "B 3 H W"]) -> Float32[Tensor, "B 3 H W"]:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
    return (pixels - mean) / std


def _shuffle_patches(
    image: Float32[Tensor, "3 H W"], amount: float, rng: np.random.Generator
) -> Float32[Tensor, "3 H W"]:
    """Swap patches of 16 x 16 pixels, like a decoder that confuses the quarters of a cell."""
    patches = image.unflatten(1, (8, 16)).unflatten(3, (8, 16)).permute(1, 3, 0, 2, 4)
    patches = patches.reshape(64, 3, 16, 16).clone()
    chosen = torch.from_numpy(rng.permutation(64)[: max(2, int(32 * amount))])
    patches[chosen] = patches[chosen.roll(1)]
    return patches.view(8, 8, 3, 16, 16).permute(2, 0, 3, 1, 4).reshape(image.shape)
