"""Predict human preference for an image given its prompt, with HPS v2."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from typing_extensions import override

from rewards.base import Reward, TermConfig
from rewards.options import PathText
from rewards.terms.clip import ClipScoreReward
from rewards.terms.clip_loading import clip_bytes, find_architecture, resolve_path
from rewards.types import RewardError

_CHECKPOINT_URL = "https://huggingface.co/xswu/HPSv2/resolve/main/HPS_v2.1_compressed.pt"


class HpsConfig(TermConfig):
    """Human preference for the image given the prompt, as predicted by HPS v2."""

    compares_with = ("prompt",)
    files = ("clip_model", "checkpoint")
    kind: Literal["hps"]
    """Class that scores."""
    clip_model: PathText = "ViT-H-14"
    """An open_clip architecture, or the path of a model config in open_clip's JSON format."""
    checkpoint: PathText = "HPS_v2.1_compressed.pt"
    """The published checkpoint, a file from huggingface.co/xswu/HPSv2."""

    @override
    def check(self) -> None:
        _find_checkpoint(self.checkpoint)
        find_architecture(self.clip_model, key="hps.clip_model")

    @override
    def build(self, device: torch.device) -> Reward:
        return HpsReward(clip_model=self.clip_model, checkpoint=self.checkpoint, device=device)

    @override
    def memory_bytes(self) -> int:
        """Size of both towers."""
        return clip_bytes(self.clip_model, is_image_only=False)


def _find_checkpoint(checkpoint: str) -> Path:
    path = resolve_path(checkpoint)
    if not path.is_file():
        raise RewardError(
            f"hps.checkpoint {path}: no such file; download {_CHECKPOINT_URL} and set "
            "hps.checkpoint to its path"
        )
    return path


class HpsReward(ClipScoreReward):
    """Cosine of HPS v2's embeddings of prompt and image: -1..1, higher is better.

    HPS v2 is a CLIP ViT-H-14 that was fine-tuned on human choices between images. Scores of
    generated images are about 0.2 to 0.3 (the published tables show them times 100), and are
    comparable between images of one prompt. The end of a prompt longer than 77 tokens is
    ignored.

    As upstream, an image that is not square is fitted into the square by its longest edge and
    padded with black, not cropped. Unlike upstream, images are resized by Pillow in 8 bits, not
    as float tensors, and the model runs in float32, not under autocast.

    986 million parameters, 3.9 GB of memory in float32 besides the activations. Code Apache-2.0,
    https://github.com/tgxs002/HPSv2; weights https://huggingface.co/xswu/HPSv2.
    Source: Wu et al., Human Preference Score v2, arXiv:2306.09341.

    Args:
        checkpoint: Published file, `HPS_v2.1_compressed.pt` or the v2.0 one: a state dict under
            `state_dict`.

    Raises:
        RewardError: The checkpoint is missing or belongs to another model.
    """

    def __init__(self, *, clip_model: str, checkpoint: str, device: torch.device) -> None:
        super().__init__(
            clip_model=clip_model,
            # Absolute, so that no path is mistaken for a pretrained tag of the same name.
            clip_weights=str(_find_checkpoint(checkpoint).absolute()),
            device=device,
            resize_mode="longest",
            keys=("hps.clip_model", "hps.checkpoint"),
        )
