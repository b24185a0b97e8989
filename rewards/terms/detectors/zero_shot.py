"""Find objects of any class, which is described in words: OWLv2 and GroundingDINO."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor, nn

from rewards.detection import Detection
from rewards.terms.detectors.base import (
    Limits,
    boxes_in_pixels,
    detections_of_boxes,
    device_of,
    prepare,
)
from rewards.types import RewardError


class _ZeroShotDetector:
    """What zero-shot detectors share."""

    def __init__(self, model: Any, processor: Any, limits: Limits) -> None:
        self._model = model
        self._images = processor.image_processor
        self._tokenizer = processor.tokenizer
        self._limits = limits

    def classes(self) -> None:
        """None: any class."""
        return

    def modules(self) -> tuple[nn.Module, ...]:
        """The whole network."""
        return (self._model,)

    def _detections(
        self,
        scores: Float32[Tensor, "N Q C"],
        boxes: Float32[Tensor, "N Q 4"],
        classes: Sequence[str],
    ) -> list[list[Detection]]:
        return [
            detections_of_boxes(*each, classes, asked=classes, limits=self._limits)
            for each in zip(scores.cpu(), boxes.cpu(), strict=True)
        ]


class Owlv2Detector(_ZeroShotDetector):
    """Objects as boxes by OWLv2, asked for "a photo of a {class}".

    Of boxes on the same place the best stays. Scores are low, about .1 to .4 for what people see.

    Source: Minderer et al., Scaling Open-Vocabulary Object Detection, NeurIPS 2023.

    Args:
        model: `Owlv2ForObjectDetection`.
        processor: `Owlv2Processor`.
    """

    @torch.no_grad()
    def detect(
        self, pixels: UInt8[Tensor, "N 3 H W"], classes: Sequence[str]
    ) -> list[list[Detection]]:
        """See `Detector.detect`.

        Raises:
            RewardError: The name of a class is too long for the model.
        """
        longest = self._model.config.text_config.max_position_embeddings
        captions = [f"a photo of a {name}" for name in classes]
        for caption, ids in zip(captions, self._tokenizer(captions)["input_ids"], strict=True):
            if len(ids) > longest:
                raise RewardError(
                    f"{caption!r} is {len(ids)} tokens, and this detector reads at most {longest}; "
                    "use a shorter name of the class"
                )
        tokens = self._tokenizer(
            captions, padding="max_length", max_length=longest, return_tensors="pt"
        )
        device = device_of(self._model)
        # The network takes the queries of one image after the other.
        repeated = {
            name: tokens[name].repeat(len(pixels), 1).to(device)
            for name in ("input_ids", "attention_mask")
        }
        output = self._model(**prepare(self._images, pixels, device), **repeated)
        height, width = pixels.shape[2:]
        # Images are padded below or at the right to a square.
        longest = max(height, width)
        boxes = boxes_in_pixels(
            output.pred_boxes.float(), scale=(longest, longest), size=(width, height)
        )
        return self._detections(output.logits.float().sigmoid(), boxes, classes)


class GroundingDinoDetector(_ZeroShotDetector):
    """Objects as boxes by GroundingDINO, asked for "one class. another class.".

    A box's score for a class is the highest of the class's tokens. Of boxes on the same place the
    best stays.

    Source: Liu et al., Grounding DINO, ECCV 2024, https://github.com/IDEA-Research/GroundingDINO.

    Args:
        model: `GroundingDinoForObjectDetection`.
        processor: `GroundingDinoProcessor`.
    """

    @torch.no_grad()
    def detect(
        self, pixels: UInt8[Tensor, "N 3 H W"], classes: Sequence[str]
    ) -> list[list[Detection]]:
        """See `Detector.detect`.

        Raises:
            RewardError: The names of all classes together are too long for the model.
        """
        # Both marks separate classes.
        names = [re.sub("[.?]", " ", name).lower().strip() for name in classes]
        tokens = self._tokenizer(
            "".join(f"{name}. " for name in names).strip(), return_tensors="pt"
        )
        longest = self._model.config.max_text_len
        if tokens["input_ids"].shape[1] > longest:
            raise RewardError(
                f"the names of {len(classes)} classes are {tokens['input_ids'].shape[1]} tokens, "
                f"and this detector reads at most {longest}; ask for fewer classes at a time"
            )
        is_of_class = self._tokens_of_classes(tokens["input_ids"][0], len(classes), longest)
        device = device_of(self._model)
        repeated = {
            name: tokens[name].repeat(len(pixels), 1).to(device)
            for name in ("input_ids", "token_type_ids", "attention_mask")
        }
        output = self._model(**prepare(self._images, pixels, device), **repeated)
        probabilities = output.logits.float().sigmoid()
        scores = torch.stack(
            [probabilities[..., each].amax(dim=-1) for each in is_of_class.to(device)], dim=-1
        )
        size = pixels.shape[3], pixels.shape[2]
        boxes = boxes_in_pixels(output.pred_boxes.float(), scale=size, size=size)
        return self._detections(scores, boxes, classes)

    def _tokens_of_classes(
        self, tokens: Int64[Tensor, " T"], count: int, longest: int
    ) -> Bool[Tensor, "C L"]:
        """Which of the places for tokens have those of each class."""
        dot = self._tokenizer.convert_tokens_to_ids(".")
        begin = self._tokenizer.cls_token_id
        is_of_class = torch.zeros(count, longest, dtype=torch.bool)
        current = 0
        for place, token in enumerate(tokens.tolist()):
            if token == dot:
                current += 1
            elif token != begin and current < count:
                is_of_class[current, place] = True
        return is_of_class
