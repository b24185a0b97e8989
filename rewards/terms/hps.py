"""Predict human preference for a picture given its prompt, with HPS v2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.base import Reward, TermConfig
from rewards.options import PathText
from rewards.terms.clip_loading import (
    PictureEmbedder,
    PromptEmbedder,
    clip_bytes,
    find_architecture,
    load_clip,
    pair_cosine,
    resolve_path,
)
from rewards.types import Prompt, RewardError

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

    def check(self) -> None:
        """See `TermConfig`."""
        _find_checkpoint(self.checkpoint)
        find_architecture(self.clip_model, key="hps.clip_model")

    def build(self, device: torch.device) -> Reward:
        """See `TermConfig`."""
        return HpsReward(clip_model=self.clip_model, checkpoint=self.checkpoint, device=device)

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


class HpsReward:
    """Cosine of HPS v2's embeddings of prompt and picture: -1..1, higher is better.

    HPS v2 is a CLIP ViT-H-14 that was fine-tuned on human choices between pictures. Scores of
    generated pictures are about 0.2 to 0.3 (the published tables show them times 100), and are
    comparable between pictures of one prompt. Prompts are truncated to 77 tokens.

    As upstream, a picture that is not square is fitted into the square by its longest edge and
    padded with black, not cropped. Unlike upstream, pictures are resized by Pillow in 8 bits, not
    as float tensors, and the model runs in float32, not under autocast.

    Needs the prompt. 986 million parameters, 3.9 GB of memory in float32 besides the activations.
    Code Apache-2.0, https://github.com/tgxs002/HPSv2; weights https://huggingface.co/xswu/HPSv2.
    Source: Wu et al., Human Preference Score v2, arXiv:2306.09341.

    Args:
        clip_model: An open_clip architecture, or the path of a model config in its JSON format.
        checkpoint: Published file, `HPS_v2.1_compressed.pt` or the v2.0 one: a state dict under
            `state_dict`.
        device: Device for the model.

    Raises:
        RewardError: The checkpoint is missing or belongs to another model.
    """

    def __init__(self, *, clip_model: str, checkpoint: str, device: torch.device) -> None:
        path = _find_checkpoint(checkpoint)
        architecture = find_architecture(clip_model, key="hps.clip_model")
        # Absolute, so that no path is mistaken for a pretrained tag of the same name.
        clip = load_clip(architecture, str(path.absolute()), key="hps.checkpoint")
        self._prompts = PromptEmbedder(clip, architecture, key="hps.clip_model")
        self._pictures = PictureEmbedder(clip, resize_mode="longest")
        self._model: nn.Module = clip.to(device)

    def applies_to(self, prompt: Prompt) -> bool:
        """True: it applies to every prompt."""
        return True

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Rate how well each picture answers its prompt, on the device of the model."""
        texts = self._prompts.embed([prompt.prompt for prompt in prompts])
        return pair_cosine(texts, self._pictures.embed(pixels))

    def modules(self) -> tuple[nn.Module, ...]:
        """Both towers, in one module."""
        return (self._model,)
