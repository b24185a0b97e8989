"""Pictures -> target-grid tokens, by the model's own vision tower and VQ."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor


@torch.no_grad()
def picture_tokens(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    pixels: UInt8[Tensor, "B 3 H W"],
) -> Int64[Tensor, "B S"]:
    """The tokens that stand for pictures, as the decoder reads them.

    Runs where the vision tower is; sides of the pictures are multiples of 32 pixels.
    """
    inputs = processor.image_processor(images=list(pixels), return_tensors="pt")
    tower = model.model.visual
    inputs = {
        name: value.to(tower.device, tower.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }
    features = model.get_image_features(**inputs).pooler_output
    # Not `get_image_tokens`, which takes what `get_image_features` of the same version gives.
    ids = [
        model.model.vqmodel.encode(_as_grid(each, rows, columns)[None]).image_tokens.flatten()
        for each, (_, rows, columns) in zip(
            features, inputs["image_grid_thw"].tolist(), strict=True
        )
    ]
    return torch.stack(ids).cpu()


def _as_grid(features: Float[Tensor, "..."], rows: int, columns: int) -> Float[Tensor, "C h w"]:
    """A picture's features: rows of patches in transformers 5.17, a grid from 5.18 on."""
    return features.T.reshape(-1, rows, columns) if features.ndim == 2 else features
