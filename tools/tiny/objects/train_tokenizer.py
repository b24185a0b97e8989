"""Stages `decoder`, `decoder-fine` and `encoder`: train the two halves of the VQ model.

Token and cell are one: code i of the codebook is cell i of the world. The encoder learns to find
the code of every cell, and the decoder to draw every code in images of the world, some of whose
cells are exchanged for any others, so that it shows faithfully what a policy asks for.

Images are whole, because the norms of the model have a group for each channel at this size: what a
cell looks like depends on how much of the image is ground.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.nn import functional
from transformers import JanusForConditionalGeneration

from glm_grpo.models.janus_pro.prompt_inputs import image_tokens
from glm_grpo.tiny.objects import world
from tools.tiny.stage import Schedule, train_stage

logger = logging.getLogger(__name__)

_BATCH = 6
_MOST_EXCHANGED = 12
"""Largest number of cells of an image that are exchanged for any others."""
_BLANK_WEIGHT = 0.3
"""Weight of pixels of blank cells, of which there are most."""
_SHARPNESS = 20.0
"""Factor of the similarity of directions before the softmax over codes."""


def train_tokenizer(model: JanusForConditionalGeneration, *, folder: Path, seed: int) -> None:
    """Train encoder and decoder of `model` in place; the codebook stays."""
    vq = model.model.vqmodel
    codes = functional.normalize(vq.quantize.embedding.weight.detach(), dim=1)
    vq.requires_grad_(True)

    def encoder_loss(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        cells = _batch(rng)
        pixels = world.draw_cells(cells).float() / 127.5 - 1.0
        latents = vq.quant_conv(vq.encoder(pixels))
        directions = functional.normalize(latents.flatten(2).transpose(1, 2), dim=2)
        logits = _SHARPNESS * directions @ codes.T
        return functional.cross_entropy(logits.flatten(0, 1), cells.flatten())

    def decoder_loss(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        cells = _batch(rng)
        wanted = world.draw_cells(cells).float() / 127.5 - 1.0
        error = _decode(vq, codes[cells]) - wanted
        weight = torch.where(cells == 0, _BLANK_WEIGHT, 1.0).unsqueeze(1)
        weight = functional.interpolate(weight, scale_factor=float(world.CELL), mode="nearest")
        return ((error.abs() + error.square()) * weight).mean() / weight.mean()

    train_stage(
        "decoder",
        (vq.post_quant_conv, vq.decoder),
        decoder_loss,
        schedule=Schedule(steps=1200, learning_rate=2e-3),
        folder=folder,
        seed=seed,
    )
    train_stage(
        "decoder-fine",
        (vq.post_quant_conv, vq.decoder),
        decoder_loss,
        schedule=Schedule(steps=700, learning_rate=1.5e-3, warmup_steps=20),
        folder=folder,
        seed=seed,
    )
    train_stage(
        "encoder",
        (vq.quant_conv, vq.encoder),
        encoder_loss,
        schedule=Schedule(steps=600, learning_rate=1e-3),
        folder=folder,
        seed=seed,
    )


@torch.no_grad()
def check_tokenizer(model: JanusForConditionalGeneration) -> None:
    """Refuse a tokenizer that changes the cells of an image, or draws other ones.

    Raises:
        RuntimeError: More than 0.5 % of the cells are wrong.
    """
    rng = np.random.default_rng(0)
    vq = model.model.vqmodel
    scenes = [world.arrange(world.random_request(rng), rng) for _ in range(100)]
    cells = torch.stack([world.scene_cells(scene) for scene in scenes])
    read = image_tokens(vq, world.draw_cells(cells)).view_as(cells)
    drawn = vq.decode(cells.flatten(1)).clamp(-1, 1)
    wanted = world.draw_cells(cells).float() / 127.5 - 1.0
    wrong = (read != cells).float().mean().item()
    error = (drawn - wanted).abs().mean().item() * 127.5
    logger.info("cells read wrong %.4f; mean error of drawn pixels %.2f levels", wrong, error)
    if wrong > 0.005 or error > 3.0:
        raise RuntimeError("the tokenizer is not trained; train its stages longer")


def _batch(rng: np.random.Generator) -> Int64[Tensor, "B 8 8"]:
    scenes = [world.arrange(world.random_request(rng), rng) for _ in range(_BATCH)]
    cells = torch.stack([world.scene_cells(scene) for scene in scenes])
    for grid in cells.flatten(1):
        places = rng.permutation(len(grid))[: rng.integers(_MOST_EXCHANGED + 1)]
        others = rng.integers(len(world.cell_atlas()), size=len(places))
        grid[torch.from_numpy(places)] = torch.from_numpy(others)
    return cells


def _decode(vq: Any, codes: Float32[Tensor, "B h w D"]) -> Float32[Tensor, "B 3 H W"]:
    return vq.decoder(vq.post_quant_conv(codes.permute(0, 3, 1, 2)))
