"""Stage `tokenizer`: train the vision tower and the VQ codebook, which turn images into tokens.

The tower learns to represent what is in a cell (a temporary linear head reconstructs the cell from
the quantiser's input). Then a code is placed at the mean direction of every cell, and both are
trained further with the quantiser's own loss, which makes the features of a cell independent of its
neighbours.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn
from torch.nn import functional
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from glm_grpo.models.glm_image.prompt_inputs import image_tokens
from glm_grpo.tiny import world
from tools.tiny.stage import Schedule, train_stage

_BATCH = 32
_CELL_PIXELS = 3 * 16 * 16


def train_tokenizer(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    *,
    folder: Path,
    seed: int,
) -> None:
    """Train the vision tower and the VQ of `model` in place."""
    head = nn.Linear(model.config.vq_config.embed_dim, _CELL_PIXELS)
    tower, quantizer = model.model.visual, model.model.vqmodel
    tower.requires_grad_(True)
    quantizer.requires_grad_(True)

    def features_of(cells: Int64[Tensor, "B 4 4"]) -> tuple[Tensor, Tensor]:
        images = list(world.draw_cells(cells))
        inputs = processor.image_processor(images=images, return_tensors="pt")
        grids = model.get_image_features(**inputs).pooler_output
        return quantizer.quant_conv(torch.stack(list(grids))), inputs["pixel_values"]

    def draw_loss(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        features, patches = features_of(_batch(rng))
        normal = functional.normalize(features, dim=1).permute(0, 2, 3, 1).reshape(len(patches), -1)
        return functional.mse_loss(head(8 * normal), patches)

    def quantized_loss(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        features, patches = features_of(_batch(rng))
        quantized, commitment, _ = quantizer.quantize(features)
        rows = quantized.permute(0, 2, 3, 1).reshape(len(patches), -1)
        return functional.mse_loss(head(8 * rows), patches) + 4 * commitment

    train_stage(
        "tokenizer-draw",
        (tower, quantizer, head),
        draw_loss,
        schedule=Schedule(steps=600, learning_rate=2e-3),
        folder=folder,
        seed=seed,
    )
    if not (folder / "tokenizer-quantize.snapshot.pt").exists():
        rng = np.random.default_rng(seed)
        with torch.no_grad():
            cells = torch.cat([_batch(rng) for _ in range(40)])
            features = torch.cat([features_of(part)[0] for part in cells.split(_BATCH)])
            _lay_codebook(quantizer.quantize.embedding.weight, features, cells)
    train_stage(
        "tokenizer-quantize",
        (tower, quantizer, head),
        quantized_loss,
        schedule=Schedule(steps=300, learning_rate=5e-4, warmup_steps=20, weight_decay=0.0),
        folder=folder,
        seed=seed,
    )


@torch.no_grad()
def cell_tokens(
    model: GlmImageForConditionalGeneration, processor: GlmImageProcessor
) -> Int64[Tensor, " C"]:
    """Token of every cell of the world, C = NUM_CELLS, read from images by majority.

    Raises:
        RuntimeError: Neighbours change a cell's token in more than 1 % of the positions, or two
            different cells share a token: the tokenizer is not trained.
    """
    rng = np.random.default_rng(0)
    cells = torch.stack([world.random_mosaic(rng) for _ in range(1500)])
    cells[0].view(-1)[:] = torch.arange(16)
    tokens = torch.cat(
        [image_tokens(model, processor, world.draw_cells(part)) for part in cells.split(250)]
    )
    votes = torch.zeros(world.NUM_CELLS, model.config.vq_config.num_embeddings)
    votes.index_put_((cells.view(-1), tokens.view(-1)), torch.ones(cells.numel()), accumulate=True)
    count, winner = votes.max(dim=1)
    unstable = 1 - (count.sum() / votes.sum()).item()
    atlas = world.cell_atlas()
    distinct = len({tile.numpy().tobytes() for tile in atlas})
    if unstable > 0.01 or len(set(winner.tolist())) < distinct:
        raise RuntimeError(
            f"tokens are not stable: {unstable:.2%} of the cells change their token with their "
            f"neighbours (allowed 1 %), {len(set(winner.tolist()))} tokens for {distinct} cells; "
            "train the tokenizer stage longer"
        )
    return winner


def _batch(rng: np.random.Generator) -> Int64[Tensor, "B 4 4"]:
    mosaics = [world.random_mosaic(rng) for _ in range(_BATCH // 2)]
    signs = [world.sign_cells(world.random_sign(rng)) for _ in range(_BATCH // 2)]
    return torch.stack(mosaics + signs)


def _lay_codebook(
    codebook: Float32[Tensor, "V D"],
    features: Float32[Tensor, "B D 4 4"],
    cells: Int64[Tensor, "B 4 4"],
) -> None:
    """Set code i to the mean direction of cell i; codes beyond the cells are unchanged."""
    directions = functional.normalize(features, dim=1).permute(0, 2, 3, 1).flatten(0, 2)
    sums = torch.zeros(world.NUM_CELLS, directions.shape[1]).index_add_(
        0, cells.flatten(), directions
    )
    codebook[: world.NUM_CELLS] = functional.normalize(sums, dim=1)
