"""Call the libraries of the reward terms as a user would: image by image, default settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from rapidocr import RapidOCR
from torch import Tensor, nn

from benchmarks.embedded import CPU
from glm_grpo.config import Config
from rewards.base import Reward, TermConfig, score_checked
from rewards.build import build_reward
from rewards.images import to_bgr_arrays
from rewards.terms.ocr import OcrReward, RapidOcrConfig
from rewards.terms.reading_orders import TextBox, text_box
from rewards.types import Prompt

Score = Callable[[Sequence[Prompt], UInt8[Tensor, "N 3 H W"]], Float32[Tensor, "N R"]]
"""Scores N images by R terms."""


class DefaultRapidOcr:
    """RapidOCR with its own thread pools.

    Detection and reading are configured as in `RapidOcrReader`, because speed should be compared at
    equal scores; at its default detection side of 736 it would also have more to compute.

    Args:
        detection_side: Pixels; None: RapidOCR's default.
    """

    def __init__(self, detection_side: int | None) -> None:
        limits = {} if detection_side is None else {"Det.limit_side_len": detection_side}
        self._engine = RapidOCR(
            params={
                "Global.log_level": "critical",
                "Global.use_cls": False,
                "Det.limit_type": "min",
                "Rec.rec_batch_num": 1,
                **limits,
            }
        )

    def read(self, pixels: UInt8[Tensor, "N 3 H W"]) -> list[list[TextBox]]:
        """Read the pieces of text of each image."""
        return [self._read_one(image) for image in to_bgr_arrays(pixels)]

    def alphabet(self) -> frozenset[str]:
        """Characters of the recognition model."""
        self._engine(np.zeros((48, 48, 3), dtype=np.uint8), use_det=False)
        return frozenset(self._engine.text_rec.postprocess_op.character)

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty, because the models are not PyTorch networks."""
        return ()

    def _read_one(self, image: UInt8[np.ndarray, "H W 3"]) -> list[TextBox]:
        # The engine remembers the options of its last call, and `alphabet` disables detection.
        found = self._engine(image, use_det=True)
        if found.boxes is None or found.txts is None:
            return []
        corners = np.asarray(found.boxes, dtype=np.float64)
        return [*map(text_box, found.txts, corners)]


def plain_rewards(config: Config) -> dict[str, Reward]:
    """The terms of a config, with OCR in RapidOCR's own threads."""
    return {name: _plain_reward(options) for name, options in config.reward.terms.items()}


def _plain_reward(options: TermConfig) -> Reward:
    if isinstance(options, RapidOcrConfig):
        return OcrReward(DefaultRapidOcr(options.detection_side))
    return build_reward(options, CPU)


def one_by_one(rewards: Sequence[Reward]) -> Score:
    """Score every image by every term, one after the other."""

    def score(
        prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, "N R"]:
        rows = [
            torch.cat([score_checked(each, [prompt], image[None]).values for each in rewards])
            for prompt, image in zip(prompts, pixels, strict=True)
        ]
        return torch.stack(rows)

    return score
