"""Find objects with their masks: Mask2Former."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from rewards.base import to_unit_range
from rewards.detection import Detection
from rewards.terms.detectors.base import Limits, best_of_each_class, device_of

_SHORTEST, _LONGEST = 800, 1333
_DIVISOR = 32
_CANDIDATES = 100
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preparation:
    """How images become the network's input.

    Attributes:
        is_resized: Whether they are resized by the published rule.
        mean: Of the colours 0..1.
        std: Of the colours 0..1.
    """

    is_resized: bool = True
    mean: tuple[float, ...] = _IMAGENET_MEAN
    std: tuple[float, ...] = _IMAGENET_STD

    @classmethod
    def of(cls, processor: Any | None) -> Preparation:
        """Read it from a model's image processor, whose size is not used; see `prepare_images`."""
        if processor is None:
            return cls()
        mean, std = tuple(processor.image_mean), tuple(processor.image_std)
        if not processor.do_normalize:
            mean, std = (0.0,) * 3, (1.0,) * 3
        return cls(bool(processor.do_resize), mean, std)


class Mask2FormerDetector:
    """Objects with masks, by the rule of the published pipeline.

    A query's score for a class is its probability, of a softmax that includes "no object", times
    the mean probability of its mask inside the mask. The 100 best pairs of query and class count,
    before masks are considered; overlaps are allowed. Boxes are the bounds of masks.

    transformers' `post_process_instance_segmentation` differs: it resizes masks to 384 x 384 first,
    and returns masks that exclude each other.

    Source: Cheng et al., Masked-attention Mask Transformer for Universal Image Segmentation, CVPR
    2022, https://github.com/facebookresearch/Mask2Former.

    Args:
        model: `Mask2FormerForUniversalSegmentation`.
        labels: Class of each column of its scores but the last, which is "no object".
    """

    def __init__(
        self, model: Any, labels: Sequence[str], preparation: Preparation, limits: Limits
    ) -> None:
        self._model = model
        self._labels = tuple(labels)
        self._preparation = preparation
        self._limits = limits

    def classes(self) -> tuple[str, ...]:
        """Those of the model."""
        return self._labels

    @torch.no_grad()
    def detect(
        self, pixels: UInt8[Tensor, "N 3 H W"], classes: Sequence[str]
    ) -> list[list[Detection]]:
        """See `Detector.detect`."""
        columns = {self._labels.index(name) for name in classes}
        return [best_of_each_class(found, self._limits) for found in self._detect(pixels, columns)]

    def modules(self) -> tuple[nn.Module, ...]:
        """The whole network."""
        return (self._model,)

    def _detect(
        self, pixels: UInt8[Tensor, "N 3 H W"], columns: set[int]
    ) -> Iterator[Iterator[Detection]]:
        images = prepare_images(pixels.to(device_of(self._model)), self._preparation)
        inputs = pad_images(images)
        output = self._model(pixel_values=inputs)
        for logits, masks in zip(
            output.class_queries_logits.float(), output.masks_queries_logits.float(), strict=True
        ):
            queries, labels, probabilities = best_candidates(logits, _CANDIDATES)
            # A score is at most the probability of the class: masks of the others cannot count.
            is_chosen = probabilities > self._limits.floor
            is_chosen &= torch.isin(labels, torch.tensor(sorted(columns), device=labels.device))
            resized = resize_masks(
                masks[queries[is_chosen]],
                inputs=(inputs.shape[2], inputs.shape[3]),
                prepared=(images.shape[2], images.shape[3]),
                image=(pixels.shape[2], pixels.shape[3]),
            )
            scores, inside = score_masks(resized, probabilities[is_chosen])
            yield self._detections(labels[is_chosen], scores, inside)

    def _detections(
        self,
        labels: Int64[Tensor, " K"],
        scores: Float32[Tensor, " K"],
        inside: Bool[Tensor, "K H W"],
    ) -> Iterator[Detection]:
        for label, score, mask in zip(labels.tolist(), scores.tolist(), inside.cpu(), strict=True):
            if score > self._limits.floor:
                rows = mask.any(dim=1).nonzero().flatten().tolist()
                columns = mask.any(dim=0).nonzero().flatten().tolist()
                yield Detection(
                    self._labels[label],
                    score,
                    left=float(columns[0]),
                    top=float(rows[0]),
                    right=float(columns[-1] + 1),
                    bottom=float(rows[-1] + 1),
                    # A copy, because a slice would keep the masks of all candidates in memory.
                    mask=mask.clone(),
                )


def prepare_images(
    pixels: UInt8[Tensor, "N 3 H W"], preparation: Preparation
) -> Float32[Tensor, "N 3 h w"]:
    """Resize images to a shortest edge of 800, the longest at most 1333, and normalise them."""
    from torchvision.transforms.v2.functional import resize  # noqa: PLC0415

    if preparation.is_resized:
        height, width = pixels.shape[2:]
        scale = min(_SHORTEST / min(height, width), _LONGEST / max(height, width))
        size = [int(side * scale + 0.5) for side in (height, width)]
        pixels = resize(pixels, size, antialias=True)  # bilinear, in 8 bits, as published
    colours = to_unit_range(pixels, pixels.device)
    mean, std = (
        torch.tensor(values, device=pixels.device)[:, None, None]
        for values in (preparation.mean, preparation.std)
    )
    return (colours - mean) / std


def pad_images(images: Float32[Tensor, "N 3 H W"]) -> Float32[Tensor, "N 3 h w"]:
    """Pad normalised images at the right and below with the mean colour, to multiples of 32."""
    height, width = images.shape[2:]
    return pad(images, (0, -width % _DIVISOR, 0, -height % _DIVISOR))


def best_candidates(
    logits: Float32[Tensor, "Q L"], most: int
) -> tuple[Int64[Tensor, " K"], Int64[Tensor, " K"], Float32[Tensor, " K"]]:
    """The pairs of query and class with the highest probability, best first.

    Args:
        logits: The last class is "no object".

    Returns:
        Queries, classes and probabilities.
    """
    probabilities = logits.softmax(dim=-1)[:, :-1]
    flat = probabilities.flatten()
    best = flat.topk(min(most, len(flat)))
    count = probabilities.shape[1]
    return best.indices // count, best.indices % count, best.values


def resize_masks(
    logits: Float32[Tensor, "K h w"],
    *,
    inputs: tuple[int, int],
    prepared: tuple[int, int],
    image: tuple[int, int],
) -> Float32[Tensor, "K H W"]:
    """Bring masks to the network's input, cut off its padding, and bring them to the image.

    Args:
        inputs: Height and width of the network's input.
        prepared: Those of the image in it, its upper left part.
        image: Those of the image.
    """
    resized = interpolate(logits[:, None], size=inputs, mode="bilinear", align_corners=False)
    cut = resized[:, :, : prepared[0], : prepared[1]]
    return interpolate(cut, size=image, mode="bilinear", align_corners=False)[:, 0]


def score_masks(
    logits: Float32[Tensor, "K H W"], probabilities: Float32[Tensor, " K"]
) -> tuple[Float32[Tensor, " K"], Bool[Tensor, "K H W"]]:
    """Scores of candidates, and where their masks are; an empty mask has the score 0."""
    inside = logits > 0
    area = inside.sum(dim=(1, 2)).clamp(min=1)
    return probabilities * (logits.sigmoid() * inside).sum(dim=(1, 2)) / area, inside
