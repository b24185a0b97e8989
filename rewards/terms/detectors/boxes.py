"""Find objects as boxes, of the classes that a detector was trained on: RT-DETR and its kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from rewards.base import to_unit_range
from rewards.detection import Detection
from rewards.terms.detectors.base import (
    Limits,
    boxes_in_pixels,
    detections_of_boxes,
    device_of,
    prepare,
)
from rewards.types import RewardError


class BoxDetector:
    """Objects as boxes without masks; of boxes on the same place the best stays.

    RT-DETR does not suppress overlaps by itself: one place may have several classes.

    Source: Zhao et al., DETRs Beat YOLOs on Real-time Object Detection, CVPR 2024; Lv et al.,
    RT-DETRv2, arXiv:2407.17140, https://github.com/lyuwenyu/RT-DETR.

    Args:
        model: A stock class whose scores are sigmoids, one column per class.
        processor: The model's image processor. None: its input is the image, with colours 0..1.
        labels: Class of each column of its scores.
    """

    def __init__(
        self, model: Any, processor: Any | None, labels: Sequence[str], limits: Limits
    ) -> None:
        self._model = model
        self._processor = processor
        self._labels = tuple(labels)
        self._limits = limits

    def classes(self) -> tuple[str, ...]:
        """Those of the model."""
        return self._labels

    @torch.no_grad()
    def detect(
        self, pixels: UInt8[Tensor, "N 3 H W"], classes: Sequence[str]
    ) -> list[list[Detection]]:
        """See `Detector.detect`.

        Raises:
            RewardError: Without a processor, the model does not take images of this size.
        """
        device = device_of(self._model)
        size = pixels.shape[3], pixels.shape[2]
        stride = max(self._model.config.feat_strides)
        if self._processor is None and any(side % stride for side in size):
            raise RewardError(
                f"the image has {size[0]} x {size[1]} pixels, and a detector without an image "
                f"processor takes only multiples of {stride}: scale it, or save a processor with "
                "processor.save_pretrained(folder) beside the model"
            )
        inputs = (
            to_unit_range(pixels, device)
            if self._processor is None
            else prepare(self._processor, pixels, device)["pixel_values"]
        )
        output = self._model(pixel_values=inputs)
        boxes = boxes_in_pixels(output.pred_boxes.float().cpu(), scale=size, size=size)
        return [
            detections_of_boxes(scores, each, self._labels, asked=classes, limits=self._limits)
            for scores, each in zip(output.logits.float().sigmoid().cpu(), boxes, strict=True)
        ]

    def modules(self) -> tuple[nn.Module, ...]:
        """The whole network."""
        return (self._model,)
