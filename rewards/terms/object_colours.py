"""Judge the colours of detected objects with CLIP, as GenEval does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn
from torch.nn.functional import normalize

from rewards.detection import Detection
from rewards.terms.clip_loading import (
    ClipOptions,
    ImageEmbedder,
    PromptEmbedder,
    check_clip,
    clip_bytes,
    find_architecture,
    load_clip,
)
from rewards.terms.composition_rows import COLOURS

_TEMPLATES = (
    "a photo of a {colour} {label}",
    "a photo of a {colour}-colored {label}",
    "a photo of a {colour} object",
)
_GROUND = 0x99
_SCALE = 100.0
"""Factor of cosines before the softmax: the logit scale of OpenAI's CLIP."""


class ObjectColours:
    """Probabilities of the ten colours for each object, as GenEval judges colours.

    An object is cut out along its mask, on a grey ground (#999), and cropped to its box; without a
    mask, the ground inside its box stays. Its probabilities are the softmax of 100 times the
    cosines of its embedding and those of the colours, each of which is the mean of three captions.

    GenEval uses CLIP ViT-L/14 with OpenAI's weights, which are the defaults of `ClipOptions`.
    Source: Ghosh et al., GenEval, NeurIPS 2023, https://github.com/djghosh13/geneval.

    Args:
        kind: First part of the config keys in errors.

    Raises:
        RewardError: The model, its weights or its tokenizer cannot be loaded.
    """

    def __init__(self, options: ClipOptions, device: torch.device, *, kind: str) -> None:
        architecture = find_architecture(options.clip_model, key=f"{kind}.clip_model")
        clip = load_clip(architecture, options.clip_weights, key=f"{kind}.clip_weights")
        self._captions = PromptEmbedder(clip, architecture, key=f"{kind}.clip_model")
        self._images = ImageEmbedder(clip)
        self._model: nn.Module = clip.to(device)
        self._vectors: dict[str, Float32[Tensor, "10 D"]] = {}

    @torch.no_grad()
    def judge(
        self, pixels: UInt8[Tensor, "N 3 H W"], detections: Sequence[Sequence[Detection]]
    ) -> list[list[Detection]]:
        """Add colours to the detections of N images, except to those that have them.

        Returns:
            The detections in their order.
        """
        asked = [
            (image, each)
            for image, found in zip(pixels, detections, strict=True)
            for each in found
            if each.colours is None
        ]
        judged = iter(self._judge(asked))
        return [
            [next(judged) if each.colours is None else each for each in found]
            for found in detections
        ]

    def modules(self) -> tuple[nn.Module, ...]:
        """Both towers, in one module."""
        return (self._model,)

    def _judge(self, asked: Sequence[tuple[Tensor, Detection]]) -> list[Detection]:
        if not asked:
            return []
        embeddings = self._images.embed([cut_out(image, each) for image, each in asked])
        vectors = torch.stack([self._vectors_of(each.label) for _, each in asked])
        cosines = (vectors.to(embeddings.device) @ embeddings[:, :, None])[:, :, 0]
        probabilities = (_SCALE * cosines).softmax(dim=-1)
        return [
            replace(each, colours=dict(zip(COLOURS, row, strict=True)))
            for (_, each), row in zip(asked, probabilities.tolist(), strict=True)
        ]

    def _vectors_of(self, label: str) -> Float32[Tensor, "10 D"]:
        """Embeddings of the colours of a class, of length 1, kept on the CPU."""
        if label not in self._vectors:
            captions = [
                template.format(colour=colour, label=label)
                for colour in COLOURS
                for template in _TEMPLATES
            ]
            embeddings = self._captions.embed(captions)
            means = embeddings.unflatten(0, (len(COLOURS), len(_TEMPLATES))).mean(dim=1)
            self._vectors[label] = normalize(means, dim=-1).cpu()
        return self._vectors[label]


def check_object_colours(options: ClipOptions, *, kind: str) -> None:
    """Check CLIP's architecture and local files, without loading them.

    Raises:
        RewardError: One cannot be used.
    """
    check_clip(options.clip_model, options.clip_weights, kind=kind)


def object_colours_bytes(options: ClipOptions) -> int:
    """Size of both towers of CLIP in float32."""
    return clip_bytes(options.clip_model, is_image_only=False)


def cut_out(image: UInt8[Tensor, "3 H W"], found: Detection) -> UInt8[Tensor, "3 h w"]:
    """Crop an object to its box, and put it on a grey ground if its mask is known."""
    if found.mask is not None:
        image = image.where(found.mask.to(image.device), image.new_tensor(_GROUND))
    rows = _pixels(found.top, found.bottom, image.shape[1])
    columns = _pixels(found.left, found.right, image.shape[2])
    return image[:, rows, columns]


def _pixels(start: float, end: float, length: int) -> slice:
    """Pixels between two edges, rounded as Pillow does, and at least one of them."""
    first, last = round(start), round(end)
    if last > first:
        return slice(first, last)
    # A sliver lies in one pixel.
    first = min(math.floor(start), length - 1)
    return slice(first, first + 1)
