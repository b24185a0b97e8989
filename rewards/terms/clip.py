"""Score how well the image matches its prompt, or the target image, according to CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn
from typing_extensions import override

from rewards.base import (
    ComparingConfig,
    ComparingReward,
    Reward,
    TermConfig,
    compared_image,
    stack_compared,
)
from rewards.terms.clip_loading import (
    ClipOptions,
    ImageEmbedder,
    PromptEmbedder,
    ResizeMode,
    check_clip,
    clip_bytes,
    find_architecture,
    load_clip,
    pair_cosine,
)
from rewards.types import Prompt


class ClipScoreConfig(ClipOptions, TermConfig):
    """Cosine of the CLIP embeddings of prompt and image."""

    compares_with = ("prompt",)
    files = ("clip_model", "clip_weights")
    kind: Literal["clip_score"]
    """Class that scores."""

    @override
    def check(self) -> None:
        check_clip(self.clip_model, self.clip_weights, kind=self.kind)

    @override
    def build(self, device: torch.device) -> Reward:
        return ClipScoreReward(
            clip_model=self.clip_model, clip_weights=self.clip_weights, device=device
        )

    @override
    def memory_bytes(self) -> int:
        """Size of both towers."""
        return clip_bytes(self.clip_model, is_image_only=False)


class ClipImageConfig(ClipOptions, ComparingConfig):
    """Cosine of the CLIP embeddings of the target image and the sample."""

    files = ("clip_model", "clip_weights")

    kind: Literal["clip_image"]
    """Class that scores."""

    @override
    def check(self) -> None:
        check_clip(self.clip_model, self.clip_weights, kind=self.kind)

    @override
    def build(self, device: torch.device) -> Reward:
        return ClipImageReward(self, device)

    @override
    def memory_bytes(self) -> int:
        """Size of the image tower."""
        return clip_bytes(self.clip_model, is_image_only=True)


class ClipScoreReward:
    """Cosine of the CLIP embeddings of prompt and image: -1..1, higher is better.

    With OpenAI's models, matching pairs score about 0.2 to 0.3, so small differences count. Unlike
    the metric CLIPScore, it is neither scaled nor cut off at 0. The end of a prompt longer than the
    model's limit, 77 tokens for most, is ignored.

    ViT-L-14-quickgelu with the tag `openai`: 428 million parameters, 1.7 GB of memory in float32
    besides the activations, MIT, https://github.com/openai/CLIP.
    Source: Radford et al., Learning Transferable Visual Models From Natural Language Supervision,
    ICML 2021; as a metric, Hessel et al., CLIPScore, EMNLP 2021.

    Args:
        clip_model: See `ClipOptions`, as for `clip_weights`.
        resize_mode: See `ImageEmbedder`.
        keys: Config keys of model and weights, for errors.

    Raises:
        RewardError: The model, its weights or its tokenizer is missing, cannot be downloaded or
            does not match the others.
    """

    def __init__(
        self,
        *,
        clip_model: str,
        clip_weights: str,
        device: torch.device,
        resize_mode: ResizeMode | None = None,
        keys: tuple[str, str] = ("clip_score.clip_model", "clip_score.clip_weights"),
    ) -> None:
        architecture = find_architecture(clip_model, key=keys[0])
        clip = load_clip(architecture, clip_weights, key=keys[1])
        self._prompts = PromptEmbedder(clip, architecture, key=keys[0])
        self._images = ImageEmbedder(clip, resize_mode=resize_mode)
        self._model: nn.Module = clip.to(device)

    def applies_to(self, prompt: Prompt) -> bool:
        """True: every prompt has a caption."""
        return True

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Compare each image with its prompt, on the device of the model."""
        texts = self._prompts.embed([prompt.prompt for prompt in prompts])
        return pair_cosine(texts, self._images.embed(pixels))

    def modules(self) -> tuple[nn.Module, ...]:
        """Both towers, in one module."""
        return (self._model,)


class ClipImageReward(ComparingReward):
    """Cosine of the CLIP embeddings of two images, one of the prompt: -1..1, higher is better.

    1 for equal images; images with little in common still score well above 0. It compares
    content, while `lpips`, `ssim` and `psnr` compare position by position.

    Needs a target or source image. ViT-L-14-quickgelu with the tag `openai`: 304 million
    parameters (the image tower), 1.2 GB of memory in float32 besides the activations, MIT,
    https://github.com/openai/CLIP.
    Source: Radford et al., Learning Transferable Visual Models From Natural Language Supervision,
    ICML 2021.

    Raises:
        RewardError: The model or its weights are missing, cannot be downloaded or do not match.
    """

    def __init__(self, config: ClipImageConfig, device: torch.device) -> None:
        super().__init__(config.against)
        architecture = find_architecture(config.clip_model, key="clip_image.clip_model")
        clip = load_clip(architecture, config.clip_weights, key="clip_image.clip_weights")
        # The text tower is dropped.
        self._images = ImageEmbedder(clip)
        self._images.tower.to(device)

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Compare each image with that of its prompt, on the device of the image tower."""
        targets = stack_compared(prompts, pixels, self._against)
        # A group shares its target, which therefore goes through the tower once.
        ids = [id(compared_image(prompt, self._against)) for prompt in prompts]
        rows = {each: row for row, each in enumerate(ids)}
        distinct = list(rows)
        embeddings = self._images.embed(targets[list(rows.values())])
        wanted = embeddings[[distinct.index(each) for each in ids]]
        return pair_cosine(wanted, self._images.embed(pixels))

    @override
    def modules(self) -> tuple[nn.Module, ...]:
        """The image tower."""
        return (self._images.tower,)
