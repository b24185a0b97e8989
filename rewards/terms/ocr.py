"""Score the legibility of the texts that a prompt asks for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import UInt8
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from rewards.base import FLOAT32_BYTES, Reward, TermConfig
from rewards.options import MayChange
from rewards.terms.letters import place_score
from rewards.terms.reading_orders import TextBox
from rewards.terms.text_matching import BoxMatch, fold_text, match_boxes
from rewards.types import Prompt, RewardError, Scores

OCR = "ocr"
"""Usual name of the term."""


class OcrConfig(TermConfig):
    """Whether the prompt's texts can be read."""

    compares_with = ("text",)
    score_map = "always"

    kind: Literal["ocr"]
    """Class that scores."""
    case_sensitive: bool = False
    """Whether reading OPEN instead of Open is a mistake."""
    extra_text_penalty: float = Field(default=0.0, ge=0.0, le=1.0)
    """Multiply the score by 1 - extra_text_penalty * (fraction of the read text not asked for)."""

    @override
    def build(self, device: torch.device) -> Reward:
        return OcrReward(
            self.build_reader(device),
            is_case_sensitive=self.case_sensitive,
            extra_text_penalty=self.extra_text_penalty,
        )

    @abstractmethod
    def build_reader(self, device: torch.device) -> TextReader:
        """Build the engine."""


class EasyOcrConfig(OcrConfig):
    """Whether the prompt's texts can be read, by EasyOCR."""

    engine: Literal["easyocr"]
    """PyTorch, on the accelerator; downloads its weights once into EASYOCR_MODULE_PATH/model."""
    languages: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("en",)
    """EasyOCR's language codes; one script in addition to English."""

    @override
    def judges(self) -> Mapping[str, str]:
        return {f"EasyOCR for {'+'.join(self.languages)}": "easyocr"}

    @override
    def build_reader(self, device: torch.device) -> TextReader:
        from rewards.terms.ocr_easyocr import EasyOcrReader  # noqa: PLC0415

        return EasyOcrReader(self.languages, device=device)

    @override
    def memory_bytes(self) -> int:
        """Size of the CRAFT detector and the English recogniser, rounded up from their files."""
        return 24_600_000 * FLOAT32_BYTES


class RapidOcrConfig(OcrConfig):
    """Whether the prompt's texts can be read, by RapidOCR."""

    is_on_cpu = True

    engine: Literal["rapidocr"]
    """ONNX on the CPU, models in the wheel (Latin and Chinese script); needs no download."""
    threads: MayChange[int] = Field(default=2, ge=1, le=1024)
    """Images read at the same time, with one CPU thread each."""
    detection_side: int = Field(default=256, ge=64, le=16_384, multiple_of=32)
    """Pixels; images with a shorter side are enlarged to this before text detection. Time grows
    with its square; larger images are unchanged."""

    @override
    def judges(self) -> Mapping[str, str]:
        return {"RapidOCR": "rapidocr"}

    @override
    def build_reader(self, device: torch.device) -> TextReader:
        from rewards.terms.ocr_rapidocr import RapidOcrReader  # noqa: PLC0415

        del device
        return RapidOcrReader(threads=self.threads, detection_side=self.detection_side)

    @override
    def memory_bytes(self) -> int:
        """Size of the ONNX models in its wheel, which threads share."""
        models = Path(str(files("rapidocr") / "models"))
        return sum(path.stat().st_size for path in models.glob("*.onnx"))


OCR_ENGINES: dict[str, type[EasyOcrConfig] | type[RapidOcrConfig]] = {
    "easyocr": EasyOcrConfig,
    "rapidocr": RapidOcrConfig,
}
"""The two subclasses of `OcrConfig`."""


@runtime_checkable
class TextReader(Protocol):
    """An OCR engine."""

    def read(self, pixels: UInt8[Tensor, "N 3 H W"]) -> list[list[TextBox]]:
        """Read N images: the pieces of text of each, in any order."""
        ...

    def alphabet(self) -> frozenset[str]:
        """Every character the engine can return."""
        ...

    def modules(self) -> tuple[nn.Module, ...]:
        """Networks that may be moved between devices; empty for engines outside PyTorch."""
        ...


class OcrReward:
    """Fraction of the wanted texts that was read, 0..1; see `match_boxes`.

    Reading nothing is a result, not a failure, and scores 0. A prompt whose text contains a
    character that the engine cannot return is refused, because no image could score 1.
    """

    def __init__(
        self,
        reader: TextReader,
        *,
        is_case_sensitive: bool = False,
        extra_text_penalty: float = 0.0,
    ) -> None:
        self._reader = reader
        self._is_case_sensitive = is_case_sensitive
        self._extra_text_penalty = extra_text_penalty
        self._alphabet = frozenset().union(*map(self._fold, reader.alphabet()))

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt asks for a text that is not only white space."""
        for text in prompt.texts:
            foreign = sorted(set(self._fold(text)) - self._alphabet)
            if foreign:
                raise RewardError(
                    f"prompt {prompt.prompt_id} asks for the text {text!r}, of which the OCR "
                    f"engine cannot read {', '.join(map(repr, foreign))}: this would count as a "
                    "mistake in every image. Leave these characters out of the prompt's `text`, "
                    "or choose an engine or languages that have them"
                )
        return any(self._fold(text) for text in prompt.texts)

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Compare what was read in each image with its prompt's texts.

        The notes are what the engine read, see `BoxMatch.reading`.
        """
        return self._to_scores(self._match(prompts, pixels))

    @torch.no_grad()
    def score_with_map(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Like `score`; the boxes are those of the letters that were read, see `place_score`."""
        matches = self._match(prompts, pixels)
        boxes = tuple(
            place_score(match, is_case_sensitive=self._is_case_sensitive) for match in matches
        )
        return replace(self._to_scores(matches), score_map=boxes)

    def modules(self) -> tuple[nn.Module, ...]:
        """The engine's networks."""
        return self._reader.modules()

    def _match(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> list[BoxMatch]:
        return [
            match_boxes(
                boxes,
                prompt.texts,
                is_case_sensitive=self._is_case_sensitive,
                extra_text_penalty=self._extra_text_penalty,
            )
            for boxes, prompt in zip(self._reader.read(pixels), prompts, strict=True)
        ]

    @staticmethod
    def _to_scores(matches: Sequence[BoxMatch]) -> Scores:
        values = torch.tensor([match.score for match in matches], dtype=torch.float32)
        return Scores(values, tuple(match.reading for match in matches))

    def _fold(self, text: str) -> str:
        return fold_text(text, is_case_sensitive=self._is_case_sensitive)
