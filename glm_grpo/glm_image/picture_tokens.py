"""Pictures -> target-grid tokens, by the model's own vision tower and VQ."""

from __future__ import annotations

import torch
from jaxtyping import Int64, UInt8
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
    ids = model.get_image_tokens(features, inputs["image_grid_thw"])
    return ids.view(len(pixels), -1).cpu()
