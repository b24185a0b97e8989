"""Predict an aesthetic rating with a CLIP image embedding and a small head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Float32, UInt8
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import override

from rewards.base import Reward, TermConfig
from rewards.options import PathText
from rewards.terms.clip_loading import (
    ClipOptions,
    ImageEmbedder,
    check_clip,
    clip_bytes,
    embedding_width,
    find_architecture,
    load_clip,
    resolve_path,
)
from rewards.types import Prompt, RewardError
from rewards.unpickling import describe_refusal

_LOWEST_RATING, _HIGHEST_RATING = 1.0, 10.0

_HEAD_URL = (
    "https://github.com/christophschuhmann/improved-aesthetic-predictor/blob/main/"
    "sac+logos+ava1-l14-linearMSE.pth?raw=true"
)


class AestheticConfig(ClipOptions, TermConfig):
    """Predicted aesthetic rating: a CLIP image embedding and a small head."""

    compares_with = ()
    files = ("clip_model", "clip_weights", "head")
    kind: Literal["aesthetic"]
    """Class that scores."""
    head: PathText = Field(examples=["sac+logos+ava1-l14-linearMSE.pth"])
    """Head on the embedding: a LAION .pth file (linear or MLP), or a .safetensors file with
    `weight` [1, D] and `bias` [1]. Paths may have the form pkg://package/relative/path."""

    @override
    def check(self) -> None:
        architecture = check_clip(self.clip_model, self.clip_weights, kind="aesthetic")
        load_head(resolve_path(self.head), width=embedding_width(architecture))

    @override
    def build(self, device: torch.device) -> Reward:
        return AestheticReward(self, device)

    @override
    def memory_bytes(self) -> int:
        """Size of the image tower."""
        return clip_bytes(self.clip_model, is_image_only=True)


class AestheticReward:
    """A rating from 1 to 10, predicted from the image only, mapped to 0..1 and clamped.

    The image's CLIP embedding, scaled to length 1, goes through a head: LAION's linear one
    (https://github.com/LAION-AI/aesthetic-predictor) or its MLP
    (https://github.com/christophschuhmann/improved-aesthetic-predictor). Images are prepared one
    by one with open_clip's own transform, using Pillow; a batched transform on tensors would round
    differently.

    Runs on `device`: 1.2 GB in fp32 for the image tower of ViT-L/14, published by OpenAI under the
    MIT licence; LAION's heads are under MIT (linear) and Apache-2.0 (MLP).

    Raises:
        RewardError: A model, its weights or the head is missing, cannot be downloaded or does not
            match the others.
    """

    def __init__(self, config: AestheticConfig, device: torch.device) -> None:
        architecture = find_architecture(config.clip_model, key="aesthetic.clip_model")
        width = embedding_width(architecture)
        # The head first, because it is small and reveals mistakes before gigabytes are loaded.
        self._head = load_head(resolve_path(config.head), width=width).to(device)
        clip = load_clip(architecture, config.clip_weights, key="aesthetic.clip_weights")
        # The text tower is dropped: embedding an image only needs the image tower.
        self._embedder = ImageEmbedder(clip)
        self._embedder.tower.to(device)

    def applies_to(self, prompt: Prompt) -> bool:
        """True: it only uses the image."""
        return True

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Rate each image; prompts are not used."""
        rating: Tensor = self._head(self._embedder.embed(pixels))
        return to_unit_score(rating.reshape(len(prompts)))

    def modules(self) -> tuple[nn.Module, ...]:
        """Image tower and head."""
        return (self._embedder.tower, self._head)


def to_unit_score(rating: Float32[Tensor, " N"]) -> Float32[Tensor, " N"]:
    """Map ratings from 1..10 to 0..1, clamped."""
    return ((rating - _LOWEST_RATING) / (_HIGHEST_RATING - _LOWEST_RATING)).clamp(0.0, 1.0)


def load_head(path: Path, *, width: int) -> nn.Sequential:
    """Load linear layers, applied one after the other to an embedding of `width` numbers.

    Supported files: a state dict of one linear layer (`weight` [1, D], `bias` [1]: LAION v1, and
    the .safetensors form), or of several under `layers.<n>.` (LAION v2; it has no activation
    between its layers, and its dropout is for training only).

    Args:
        path: A .safetensors file, or a .pth file, which is loaded only as tensors.
    """
    try:
        state: dict[str, Tensor] = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    # Libraries raise whatever a wrong byte leads to.
    except Exception as error:
        raise RewardError(
            f"aesthetic.head {path} cannot be read as tensors ({describe_refusal(error)}); "
            f"download {_HEAD_URL} and set reward.terms.aesthetic.head to it, or leave the term "
            "out: reward.terms.aesthetic=null"
        ) from error
    # In the order of the layers, as both formats store them.
    weights = [part for key, part in state.items() if key.endswith("weight")]
    biases = [part for key, part in state.items() if key.endswith("bias")]
    sizes = [width, *(len(bias) for bias in biases)]
    shapes = [tuple(weight.shape) for weight in weights]
    if shapes != list(zip(sizes[1:], sizes[:-1], strict=True)) or sizes[-1] != 1 or not shapes:
        raise RewardError(
            f"aesthetic.head {path} has layers of shape {shapes} (out, in) and biases of "
            f"{sizes[1:]}; they must lead from the {width} numbers of the embedding of "
            "aesthetic.clip_model to 1: use the head that was trained on this model, with "
            "`weight` and `bias`, or layers.<n>.weight and layers.<n>.bias"
        )
    head = nn.Sequential(*map(_linear, weights, biases))
    return head.eval().requires_grad_(False)


def _linear(weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"]) -> nn.Linear:
    # On the meta device, no weights are drawn from the global generator.
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.load_state_dict({"weight": weight.float(), "bias": bias.float()}, assign=True)
    return layer
