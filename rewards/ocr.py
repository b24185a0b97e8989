"""Whether the text that a prompt asks for can be read in the picture."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Float64, UInt8
from rapidfuzz.distance import Levenshtein
from torch import Tensor, nn

from rewards.types import Prompt


@runtime_checkable
class TextReader(Protocol):
    """An OCR engine."""

    def read(self, pixels: UInt8[Tensor, "N 3 H W"]) -> list[str]:
        """Read N pictures: the text of each in reading order, "" where there is none."""
        ...

    def modules(self) -> tuple[nn.Module, ...]:
        """Networks that may be moved between devices; empty for engines outside PyTorch."""
        ...


class OcrReward:
    """1 - edit distance between the text read and the text wanted, divided by the longer length.

    0..1, 1 for equal texts. Both are folded first: Unicode compatibility form (engines return
    full-width letters for Latin ones), case, white space. Reading nothing is a result, not a
    failure, and scores 0. Text that no one asked for lengthens the distance.

    Args:
        reader: Reads the pictures.
    """

    name = "ocr"

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt asks for a text that is more than white space."""
        return prompt.text is not None and fold_text(prompt.text) != ""

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Compare what each picture says with its prompt's text.

        Raises:
            ValueError: A prompt asks for no text.
        """
        wanted = [_wanted_text(prompt) for prompt in prompts]
        pairs = zip(self.read(pixels), wanted, strict=True)
        return torch.tensor([text_similarity(read, text) for read, text in pairs])

    def read(self, pixels: UInt8[Tensor, "N 3 H W"]) -> list[str]:
        """Read N pictures as the engine returns them, for people to look at."""
        return self._reader.read(pixels)

    def modules(self) -> tuple[nn.Module, ...]:
        """The engine's networks."""
        return self._reader.modules()


@dataclass(frozen=True)
class TextBox:
    """A piece of text with the upright rectangle around it, in pixels, y pointing down."""

    text: str
    left: float
    top: float
    bottom: float


def text_box(text: str, corners: Float64[np.ndarray, "4 2"]) -> TextBox:
    """A text box from the (x, y) corners of the engine's box."""
    left, top = corners.min(axis=0).tolist()
    return TextBox(text, left=left, top=top, bottom=corners[:, 1].max().item())


def join_in_reading_order(boxes: Sequence[TextBox]) -> str:
    """Join texts by spaces: lines from top to bottom, each from left to right.

    A box belongs to a line if its middle is above the bottom of the line's first box. Unlike a
    fixed number of pixels, this holds for small and large pictures alike.
    """
    lines: list[list[TextBox]] = []
    for box in sorted(boxes, key=_middle):
        if lines and _middle(box) < lines[-1][0].bottom:
            lines[-1].append(box)
        else:
            lines.append([box])
    return " ".join(box.text for line in lines for box in sorted(line, key=lambda box: box.left))


def text_similarity(read: str, wanted: str) -> float:
    """1 - Levenshtein distance / longer length, of the folded texts; 0..1."""
    return Levenshtein.normalized_similarity(fold_text(read), fold_text(wanted))


def fold_text(text: str) -> str:
    """Remove what does not count as a difference: compatibility form, case, white space."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def to_bgr_arrays(pixels: UInt8[Tensor, "N 3 H W"]) -> list[UInt8[np.ndarray, "H W 3"]]:
    """Pictures as OpenCV, and so both engines, expect them: height, width, blue-green-red."""
    arrays = pixels.cpu().permute(0, 2, 3, 1).flip(-1).contiguous().numpy()
    return list(arrays)


def _middle(box: TextBox) -> float:
    return (box.top + box.bottom) / 2


def _wanted_text(prompt: Prompt) -> str:
    if prompt.text is None:
        raise ValueError(
            f"prompt {prompt.prompt_id} asks for no text; score only prompts to which the term "
            "applies"
        )
    return prompt.text
